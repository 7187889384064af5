"""The suite that every machine has: questions over documentation strings of the standard library.

The text depends on the version of Python and on nothing else, so two machines with the same one measure the same requests.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.demo.documents import passages, stdlib_modules
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS, _GROUP_DOCUMENTS, _REQUEST_DOCUMENTS, _REQUESTS = 8, 10, 4, 192
_CHARACTERS = (250, 900)
_SENTENCE_WORDS = (7, 25)
_INSTRUCTIONS = (
    "Answer the question using the passages.",
    "You are a librarian of code. Read these descriptions of functions, then answer briefly.",
    "Below are notes from a manual in no particular order. Answer in one or two words.",
    "Context first, question last. Quote the name exactly.",
)


def builtin_requests() -> Iterator[FidelityRequest]:
    """Yield 192 requests: four descriptions out of the ten of a group, in any order, and which of them says a sentence.

    Raises:
        ConfigError: The standard library's sources are not installed.
    """
    rng = random.Random(0)
    entries = list(described())
    rng.shuffle(entries)
    if len(entries) < _GROUPS * _GROUP_DOCUMENTS:
        raise ConfigError("the standard library's sources are not installed; install Python with its .py files")
    groups = [entries[start::_GROUPS][:_GROUP_DOCUMENTS] for start in range(_GROUPS)]
    for number in range(_REQUESTS):
        group = rng.randrange(_GROUPS)
        documents = rng.sample(groups[group], _REQUEST_DOCUMENTS)
        name, _, sentence = rng.choice(documents)
        question = f'Question: Which entry says this: "{sentence}"\nAnswer:'
        parts = [Part(f"{name}\n{text}", name) for name, text, _ in documents]
        yield FidelityRequest(
            str(number),
            (Part(rng.choice(_INSTRUCTIONS)), *parts, Part(question)),
            tuple(sorted(name for name, *_ in documents)),
            f"group {group}",
            (name, name.rpartition(".")[2]),
        )


@cache
def described() -> tuple[tuple[str, str, str], ...]:
    """Return name, documentation and first sentence of entries that have enough and are not named in that sentence."""
    found = []
    for module in stdlib_modules(wanted=lambda name: "test" not in name and not name.startswith("_")):
        for passage in passages(module):
            text = passage.docstring.strip()
            sentence = " ".join(text.split("\n\n")[0].split())
            fits = _CHARACTERS[0] <= len(text) <= _CHARACTERS[1]
            words = len(sentence.split())
            if fits and _SENTENCE_WORDS[0] <= words <= _SENTENCE_WORDS[1] and passage.name not in sentence:
                found.append((f"{module.name}.{passage.name}", text, sentence))
    return tuple(found)
