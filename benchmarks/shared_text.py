"""Prompts that share text and continue it differently: filled-in forms, boilerplate, licence headers. Random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Tokens = NDArray[np.int32]
    Range = tuple[int, int]

_Item = TypeVar("_Item")

VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Forms:
    """Forms of the same fields, each filled in with one of a few values: every prompt is a path through shared text.

    Attributes:
        num_fields: Fields of a form.
        num_values: Values that a field can have.
        label_tokens: Least and most tokens of a field's label; the same in every form.
        value_tokens: Least and most tokens of a value.
        own_tokens: Tokens before a form that no other has.
    """

    num_fields: int = 10
    num_values: int = 8
    label_tokens: Range = (6, 24)
    value_tokens: Range = (3, 12)
    own_tokens: int = 0

    def prompts(self, count: int, seed: int) -> list[Tokens]:
        """Draw `count` prompts."""
        text = _Text(seed)
        labels = [text.of(self.label_tokens) for _ in range(self.num_fields)]
        values = [[text.of(self.value_tokens) for _ in range(self.num_values)] for _ in labels]
        return [
            np.concatenate(
                [text.random(self.own_tokens)]
                + [part for label, value in zip(labels, values, strict=True) for part in (label, text.choice(value))]
            )
            for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Headers:
    """Files that begin with one of a few headers with a year and a name in it, and mostly go on with their own text.

    Attributes:
        num_headers: Licences.
        header_tokens: Least and most tokens of a header's paragraph.
        num_years: Years and names, each a few tokens, between the paragraphs.
        own_tokens: Least and most tokens of what follows.
    """

    num_headers: int = 3
    header_tokens: Range = (40, 120)
    num_years: int = 20
    own_tokens: Range = (50, 300)

    def prompts(self, count: int, seed: int) -> list[Tokens]:
        """Draw `count` prompts."""
        text = _Text(seed)
        headers = [[text.of(self.header_tokens) for _ in range(3)] for _ in range(self.num_headers)]
        years = [text.of((1, 6)) for _ in range(self.num_years)]
        return [
            np.concatenate(
                [part for paragraph in text.choice(headers) for part in (text.choice(years), paragraph)]
                + [text.of(self.own_tokens)]
            )
            for _ in range(count)
        ]


@dataclass(frozen=True, slots=True)
class Boilerplate:
    """Prompts put together from a stock of sentences in any order, some of them inside text of their own.

    Attributes:
        num_sentences: Sentences in the stock.
        sentence_tokens: Least and most tokens of a sentence.
        sentences: Sentences in a prompt.
        own_tokens: Least and most tokens of a prompt's own text after each sentence.
    """

    num_sentences: int = 30
    sentence_tokens: Range = (8, 40)
    sentences: int = 16
    own_tokens: Range = (0, 2)

    def prompts(self, count: int, seed: int) -> list[Tokens]:
        """Draw `count` prompts."""
        text = _Text(seed)
        stock = [text.of(self.sentence_tokens) for _ in range(self.num_sentences)]
        return [
            np.concatenate(
                [part for _ in range(self.sentences) for part in (text.choice(stock), text.of(self.own_tokens))]
            )
            for _ in range(count)
        ]


SHARED_TEXT: dict[str, Callable[[int, int], list[Tokens]]] = {
    "forms": Forms().prompts,
    "forms, short fields": Forms(label_tokens=(2, 10), value_tokens=(1, 6), num_fields=20).prompts,
    "forms, long labels": Forms(label_tokens=(20, 60)).prompts,
    "forms, long values": Forms(value_tokens=(15, 40)).prompts,
    "forms behind own text": Forms(own_tokens=40).prompts,
    "form in every line": Forms(num_fields=100, num_values=3, label_tokens=(4, 9), value_tokens=(1, 3)).prompts,
    "licence headers": Headers().prompts,
    "boilerplate": Boilerplate().prompts,
}
"""Prompts by kind of pack: functions of how many and of a seed."""


class _Text:
    """Random texts of one seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def random(self, length: int) -> Tokens:
        return self._rng.integers(0, VOCABULARY, length, dtype=np.int32)

    def of(self, lengths: Range) -> Tokens:
        return self.random(int(self._rng.integers(lengths[0], lengths[1] + 1)))

    def choice(self, options: list[_Item]) -> _Item:
        return options[int(self._rng.integers(len(options)))]
