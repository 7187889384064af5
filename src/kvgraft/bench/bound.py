"""Most tokens that could be reused, found by exact methods that share nothing with the index under test."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Tokens = NDArray[np.int32]


def covered_positions(prompts: Sequence[Tokens], min_run: int) -> list[NDArray[np.bool_]]:
    """Mark, per prompt, the tokens inside a run of at least `min_run` that occurs at any offset in an earlier prompt.

    A run of that length is a sequence of overlapping `min_run`-grams, so it is enough to know for every gram where it
    occurs first. Grams get names such that equal names mean equal grams, by doubling and without any hash.

    Source: R. Karp, R. Miller, A. Rosenberg, "Rapid identification of repeated patterns in strings, trees and arrays",
    STOC 1972.

    Complexity: O(n log n log min_run) for n tokens in all.
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    if total < min_run:
        return [np.zeros(len(prompt), np.bool_) for prompt in prompts]
    names = _gram_names(np.concatenate(prompts).astype(np.int64), min_run)
    owner = np.repeat(np.arange(len(prompts)), lengths)
    # Grams across two prompts are not grams of either.
    inside = np.flatnonzero(np.arange(len(names)) + min_run <= ends[owner[: len(names)]])
    _, first, name = np.unique(names[inside], return_index=True, return_inverse=True)
    repeats = inside[owner[inside[first]][name] < owner[inside]]
    depth = np.zeros(total + 1, np.int64)
    depth[repeats] += 1
    depth[repeats + min_run] -= 1
    return np.split(np.cumsum(depth[:-1]) > 0, ends[:-1])


def _gram_names(tokens: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Number the grams of `length` tokens such that two have the same number if and only if they are equal."""
    names = _dense(tokens)
    size = 1
    while 2 * size <= length:
        names = _pair_names(names, size)
        size *= 2
    return _pair_names(names, length - size) if size < length else names


def _pair_names(names: NDArray[np.int64], distance: int) -> NDArray[np.int64]:
    """Number the pairs of a gram and the one `distance` after it."""
    return _dense(names[:-distance] * (int(names.max()) + 1) + names[distance:])


def _dense(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


class PrefixSet:
    """Finds the longest common prefix of a prompt with any prompt added before.

    Prompts are kept in lexicographic order; the one with the longest common prefix is always a neighbour of where the
    new prompt belongs.

    Complexity: O(n log prompts).
    """

    def __init__(self) -> None:
        self._sorted: list[bytes] = []

    def longest_prefix(self, prompt: Tokens) -> int:
        """Return how many leading tokens of `prompt` some earlier prompt begins with."""
        key = _ordered_bytes(prompt)
        index = bisect_left(self._sorted, key)
        neighbours = self._sorted[max(0, index - 1) : index + 1]
        return max((_common_prefix(key, other) for other in neighbours), default=0)

    def add(self, prompt: Tokens) -> None:
        """Remember a prompt."""
        key = _ordered_bytes(prompt)
        self._sorted.insert(bisect_left(self._sorted, key), key)


def _ordered_bytes(tokens: Tokens) -> bytes:
    """Encode tokens so that bytes sort as the token sequences do."""
    return tokens.astype(">u4").tobytes()


def _common_prefix(a: bytes, b: bytes) -> int:
    size = min(len(a), len(b)) // 4
    unequal = np.flatnonzero(np.frombuffer(a, np.uint32, size) != np.frombuffer(b, np.uint32, size))
    return int(unequal[0]) if len(unequal) else size
