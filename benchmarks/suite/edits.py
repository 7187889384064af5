"""A document of the standard library's own words, and its variants: edited by sentences, reworded, another one.

The text depends on the version of Python and on the seed alone.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import chain, pairwise

from kvgraft.bench.fidelity.builtin import described
from kvgraft.errors import ConfigError

_SENTENCE_END = re.compile(r"(?<=[.!?:;])(?=\s)|(?<!\n)(?=\n\n)")
_SYNONYMS = {
    "return": "give back",
    "returns": "gives back",
    "function": "routine",
    "method": "operation",
    "object": "thing",
    "argument": "parameter",
    "arguments": "parameters",
    "string": "text",
    "list": "sequence",
    "file": "document",
    "is": "happens to be",
    "are": "happen to be",
    "if": "in case",
    "not": "never",
    "used": "employed",
    "default": "preset",
    "given": "specified",
    "contains": "holds",
    "create": "make",
    "error": "failure",
}


@dataclass(frozen=True, slots=True)
class Passage:
    """A description of something in the standard library.

    Attributes:
        name: Of what is described.
        sentences: Its text in pieces, to be concatenated.
        summary: What its first sentence says.
    """

    name: str
    sentences: tuple[str, ...]
    summary: str

    @property
    def text(self) -> str:
        """Name and description."""
        return f"{self.name}\n{''.join(self.sentences)}"


@dataclass(frozen=True, slots=True)
class Document:
    """Passages, one after another."""

    passages: tuple[Passage, ...]

    @property
    def text(self) -> str:
        """All passages."""
        return "\n\n".join(passage.text for passage in self.passages)

    @property
    def num_sentences(self) -> int:
        """Sentences of all passages."""
        return sum(len(passage.sentences) for passage in self.passages)


def documents(count: int, num_passages: int, seed: int) -> list[Document]:
    """Draw documents that share no passage.

    Raises:
        ConfigError: There are not so many descriptions on this machine.
    """
    pool = [Passage(name, _sentences(text), summary) for name, text, summary in described()]
    if len(pool) < count * num_passages:
        raise ConfigError(
            f"{count} documents of {num_passages} passages need {count * num_passages} descriptions, and the standard "
            f"library's sources have {len(pool)}; ask for fewer, or install Python with its .py files"
        )
    random.Random(seed).shuffle(pool)
    return [Document(tuple(pool[number::count][:num_passages])) for number in range(count)]


def edited(document: Document, share: float, stock: Document, kept: int, rng: random.Random) -> tuple[Document, float]:
    """Put other sentences in the place of some; returns the document and the share that was really replaced.

    Args:
        document: What is edited.
        share: Of its sentences; at least one where it is not 0.
        stock: Where the other sentences are from.
        kept: Number of a passage that stays as it is.
        rng: Chooses.
    """
    places = [
        (number, place)
        for number, passage in enumerate(document.passages)
        for place in range(len(passage.sentences))
        if number != kept
    ]
    count = min(len(places), max(1, round(share * document.num_sentences))) if share else 0
    others = sorted({sentence for passage in stock.passages for sentence in passage.sentences} - _all(document))
    changed = {place: rng.choice(others) for place in rng.sample(places, count)}
    passages = [
        Passage(
            passage.name,
            tuple(changed.get((number, place), sentence) for place, sentence in enumerate(passage.sentences)),
            passage.summary,
        )
        for number, passage in enumerate(document.passages)
    ]
    return Document(tuple(passages)), count / document.num_sentences


def reworded(document: Document) -> Document:
    """Say the same in other words and in another order: neighbouring words change places, common ones get synonyms."""
    return Document(
        tuple(Passage(each.name, tuple(map(_reworded, each.sentences)), each.summary) for each in document.passages)
    )


def _reworded(sentence: str) -> str:
    words = [_SYNONYMS.get(word.lower(), word) for word in sentence.split()]
    swapped = list(chain.from_iterable(words[start : start + 2][::-1] for start in range(0, len(words), 2)))
    return " " + " ".join(swapped)


def _all(document: Document) -> set[str]:
    return {sentence for passage in document.passages for sentence in passage.sentences}


def _sentences(text: str) -> tuple[str, ...]:
    """Cut a text after its sentences and paragraphs; nothing is lost."""
    cuts = [0, *(found.start() for found in _SENTENCE_END.finditer(text) if found.start()), len(text)]
    return tuple(text[start:end] for start, end in pairwise(cuts) if end > start)
