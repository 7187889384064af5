"""Prompts for the load test: a request pack, or a RAG workload made of the standard library's sources."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.bench.packs import load_pack
from kvgraft.bench.tokenization import load_tokenizer
from kvgraft.errors import ConfigError
from kvgraft.models import BUNDLED_MODEL, bundled_model_path

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.demo.documents import Passage

BUILTIN_RAG = "builtin:rag"
"""Name of the generated workload."""

_DOCUMENTS_PER_PROMPT = 5
_KNOWN_SHARE = 0.8
_LONGEST_PASSAGE = 1_600


@dataclass(frozen=True, slots=True)
class ServeWorkload:
    """Prompts in order of arrival.

    Attributes:
        name: Of the pack.
        prompts: Texts.
        times: Recorded arrivals in seconds, or None.
        skipped: Prompts that were left out because they are too long.
    """

    name: str
    prompts: tuple[str, ...]
    times: tuple[float, ...] | None
    skipped: int = 0

    def no_longer_than(self, limit: int, count_tokens: Callable[[str], int]) -> ServeWorkload:
        """Leave out prompts of more than `limit` tokens; a token is taken to have a byte at least."""
        kept = [
            i for i, prompt in enumerate(self.prompts) if len(prompt.encode()) <= limit or count_tokens(prompt) <= limit
        ]
        if not kept:
            raise ConfigError(
                f"{self.name}: every prompt is longer than {limit} tokens; raise the limit or take another pack"
            )
        return replace(
            self,
            prompts=tuple(self.prompts[i] for i in kept),
            times=None if self.times is None else tuple(self.times[i] for i in kept),
            skipped=len(self.prompts) - len(kept),
        )


def load_workload(pack: str, count: int, seed: int) -> ServeWorkload:
    """Read a pack, or make `count` prompts for `builtin:rag`.

    Raises:
        ConfigError: The pack is missing, malformed or has no order of arrival.
    """
    if pack == BUILTIN_RAG:
        return ServeWorkload(pack, tuple(_rag_prompts(count, seed)), None)
    workloads = load_pack(pack)
    if len(workloads) > 1:
        raise ConfigError(f"{pack}: a pack of pairs has no order of arrival; give one of requests or prompts")
    (session,) = workloads[0].sessions
    return ServeWorkload(workloads[0].name, session.requests, session.times)


def token_counter(tokenizer: str | None, model: str) -> Callable[[str], int]:
    """Return what counts tokens: a tokenizers file, else that of the bundled model, else an estimate by pieces of words."""
    if tokenizer is None and model == BUNDLED_MODEL:
        tokenizer = str(bundled_model_path() / "tokenizer.json")
    tokenize = load_tokenizer(tokenizer)
    return lambda text: len(tokenize(text))


def _rag_prompts(count: int, seed: int) -> list[str]:
    """Make prompts of an instruction, passages in random order and a question, of 1,000 to 1,500 tokens.

    A passage has been in an earlier prompt with probability 0.8 as long as there are new ones.
    """
    from kvgraft.demo.documents import INSTRUCTIONS, ask, prompt

    rng = random.Random(seed)
    fresh = _library(rng)
    known: list[Passage] = []
    prompts = []
    for _ in range(count):
        documents: list[Passage] = []
        while len(documents) < _DOCUMENTS_PER_PROMPT:
            is_known = len(known) > len(documents) and (not fresh or rng.random() < _KNOWN_SHARE)
            passage = rng.choice(known) if is_known else fresh.pop()
            if passage not in documents:
                documents.append(passage)
        known += [passage for passage in documents if passage not in known]
        prompts.append(prompt(rng.choice(INSTRUCTIONS), documents, ask(rng.choice(documents), rng)))
    return prompts


@cache
def _short_passages() -> tuple[Passage, ...]:
    from kvgraft.demo.documents import passages, stdlib_modules

    modules = stdlib_modules(wanted=lambda name: "test" not in name)
    return tuple(p for module in modules for p in passages(module) if len(p.source) <= _LONGEST_PASSAGE)


def _library(rng: random.Random) -> list[Passage]:
    found = list(_short_passages())
    if len(found) < 10 * _DOCUMENTS_PER_PROMPT:
        raise ConfigError("the standard library's sources are not installed; install Python with its .py files")
    rng.shuffle(found)
    return found
