"""Mixed prompts that share text: of request packs, and generated ones where there are no packs. Measures nothing."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft.bench.packs import load_pack
from kvgraft.bench.serve_workload import load_workload
from kvgraft.demo.documents import INSTRUCTIONS, Passage, ask, passages, prompt, stdlib_modules
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BUILTIN = ("builtin:rag", "builtin:instructions", "builtin:edits", "builtin:sessions")
"""Generated: passages in any order; another instruction before the same passage; edited digits; conversations that grow."""

_LIBRARY = ("collections", "json", "email", "logging", "random", "shutil", "string", "unittest")
"""Modules of the standard library that generated prompts quote; few, so that it takes no seconds to read them."""
_TURNS = 6


@dataclass(frozen=True, slots=True)
class MixedPrompt:
    """A prompt and where it comes from."""

    kind: str
    text: str


def mixed_prompts(sources: list[str], count: int, seed: int) -> list[MixedPrompt]:
    """Draw `count` prompts from all sources in turn, each source in its own order; fewer if the sources have fewer.

    Args:
        sources: Packs, or names of `BUILTIN`.
        count: Prompts.
        seed: Of generated prompts.

    Raises:
        ConfigError: A pack is missing or malformed, or there is no such generated source.
    """
    share = -(-count // len(sources))
    streams = {_name(source): iter(_texts(source, 4 * share, seed)) for source in sources}
    mixed: list[MixedPrompt] = []
    while streams and len(mixed) < count:
        for kind in list(streams):
            text = next(streams[kind], None)
            if text is None:
                del streams[kind]
            else:
                mixed.append(MixedPrompt(kind, text))
    return mixed[:count]


def _name(source: str) -> str:
    return source if source in BUILTIN else Path(source).name


def _texts(source: str, count: int, seed: int) -> Iterator[str]:
    if source == "builtin:rag":
        yield from load_workload(source, count, seed).prompts
    elif source in _GENERATORS:
        yield from _GENERATORS[source](count, random.Random(seed))
    elif source.startswith("builtin:"):
        raise ConfigError(f"{source}: no such generated prompts; there are {', '.join(BUILTIN)}")
    else:
        for session in load_pack(source)[0].sessions:
            yield from session.cached
            yield from session.requests


def _passages(rng: random.Random) -> list[Passage]:
    modules = stdlib_modules(wanted=lambda name: name.split(".")[0] in _LIBRARY and "test" not in name.split("."))
    found = [passage for module in modules for passage in passages(module)]
    rng.shuffle(found)
    return found


def _instructions(count: int, rng: random.Random) -> Iterator[str]:
    """The same passage under another instruction and before another question."""
    known = _passages(rng)
    for number in range(count):
        passage = known[number // 2 % len(known)]
        yield prompt(rng.choice(INSTRUCTIONS), [passage], ask(passage, rng))


def _edits(count: int, rng: random.Random) -> Iterator[str]:
    """A passage with numbers in front, and again with one of them changed: what follows it is reused, and is not the same."""
    known = _passages(rng)
    for number in range(0, count, 2):
        passage = known[number // 2 % len(known)]
        figures = [str(rng.randrange(100, 999)) for _ in range(12)]
        question = ask(passage, rng)
        for _ in range(2):
            yield f"Figures: {' '.join(figures)}\n\n{prompt('Read with care.', [passage], question)}"
            figures[rng.randrange(6)] = str(rng.randrange(100, 999))


def _sessions(count: int, rng: random.Random) -> Iterator[str]:
    """Conversations with oldest turns that fall out of the window."""
    known = _passages(rng)
    for number in range(count):
        first, turn = number // _TURNS * _TURNS, number % _TURNS
        quoted = [known[(first + i) % len(known)] for i in range(max(0, turn - 2), turn + 1)]
        turns = "\n\n".join(f"User: what is this?\n{passage.text}\nAssistant: {passage.name}." for passage in quoted)
        yield f"You are helpful. This is turn {turn}.\n\n{turns}\n\nUser: {ask(quoted[-1], rng).text}\nAssistant:"


_GENERATORS: dict[str, Callable[[int, random.Random], Iterator[str]]] = {
    "builtin:instructions": _instructions,
    "builtin:edits": _edits,
    "builtin:sessions": _sessions,
}
