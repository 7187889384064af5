"""Which k-grams of a text stand for it: a keyed rolling hash and winnowing. Knows tokens only, no donors.

Source: S. Schleimer, D. Wilkerson, A. Aiken, "Winnowing: local algorithms for document fingerprinting", SIGMOD 2003.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GRAM_TOKENS = 16
"""Tokens per k-gram: the shortest run that can be found."""

WINDOW_GRAMS = 17
"""K-grams per winnowing window, so that every shared run of `GUARANTEED_RUN` tokens shares an anchor."""

GUARANTEED_RUN = GRAM_TOKENS + WINDOW_GRAMS - 1

_WORD = (1 << 64) - 1
_HALF = np.uint64(32)
_LOWEST_HASH = np.uint64(1)

Tokens = NDArray[np.int32]
Positions = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class Anchors(NamedTuple):
    """K-grams chosen to stand for a text.

    Attributes:
        hashes: uint64, never 0. Their upper halves are small by construction; tables use the lower bits.
        positions: Ascending index of the first token of each k-gram.
    """

    hashes: Hashes
    positions: Positions


class Fingerprinter:
    """Chooses anchors of token sequences under one key.

    The hash of a k-gram depends on its tokens and the key alone, so equal text has equal anchors wherever it stands:
    any two texts that share `GUARANTEED_RUN` tokens share an anchor inside them. Whoever does not know the key can
    neither predict anchors nor aim for collisions.

    Immutable.
    """

    def __init__(self, key: bytes) -> None:
        digest = hashlib.blake2b(key, digest_size=32, person=b"kvgraft.anchors").digest()
        words = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
        base, mix_1, mix_2 = (word | 1 for word in words[1:])
        self._whiten, self._mix_1, self._mix_2 = np.uint64(words[0]), np.uint64(mix_1), np.uint64(mix_2)
        self._powers = [(span, np.uint64(pow(base, span, _WORD + 1))) for span in _doublings(GRAM_TOKENS)]

    def anchors(self, token_ids: Tokens) -> Anchors:
        """Choose the anchors of a text; none if it is shorter than a k-gram.

        A text of at least one k-gram has an anchor. About two in `WINDOW_GRAMS + 1` k-grams are chosen, and no more of
        text that repeats itself.

        Complexity: O(n), in about 30 vectorised passes.
        """
        if len(token_ids) < GRAM_TOKENS:
            return Anchors(np.empty(0, np.uint64), np.empty(0, np.int64))
        hashes = self.gram_hashes(token_ids)
        positions = _window_minima((hashes >> _HALF).astype(np.uint32))
        chosen = hashes[positions]
        chosen ^= chosen >> _HALF
        return _thin_repeats(np.maximum(chosen, _LOWEST_HASH), positions)

    def gram_hashes(self, token_ids: Tokens) -> Hashes:
        """Hash every k-gram: uint64, `len(token_ids) - GRAM_TOKENS + 1` of them. Upper bits are mixed best."""
        # Two buffers and no other allocation: a fresh one per step would cost more in page faults than in arithmetic.
        hashes, spare = token_ids.astype(np.uint64), np.empty(len(token_ids), np.uint64)
        hashes ^= self._whiten
        hashes *= self._mix_1
        hashes ^= np.right_shift(hashes, _HALF, out=spare)
        for span, power in self._powers:
            # The polynomial of 2 * span tokens from those of its two halves.
            doubled = np.multiply(hashes[:-span], power, out=spare[:-span])
            doubled += hashes[span:]
            hashes, spare = doubled, hashes[:-span]
        hashes ^= np.right_shift(hashes, _HALF, out=spare)
        hashes *= self._mix_2
        return hashes


def _doublings(length: int) -> list[int]:
    """1, 2, 4, ... below `length`, a power of two."""
    return [1 << i for i in range(length.bit_length() - 1)]


def _window_minima(values: NDArray[np.uint32]) -> Positions:
    """Ascending positions of values that are the smallest of some window; all of them where several are equal."""
    window = min(WINDOW_GRAMS, len(values))
    minima = _sliding(np.minimum, values, window)
    padded = np.zeros(len(minima) + 2 * (window - 1), np.uint32)
    padded[window - 1 : window - 1 + len(minima)] = minima
    # A value is no less than the minimum of any window around it; it is one of them if it is the largest of those.
    return np.flatnonzero(values == _sliding(np.maximum, padded, window))


def _sliding(reduce: np.ufunc, values: NDArray[np.uint32], window: int) -> NDArray[np.uint32]:
    """Reduce every window of `values` with an idempotent ufunc in O(log window) passes."""
    size = 1
    while 2 * size <= window:
        values = reduce(values[:-size], values[size:])
        size *= 2
    rest = window - size
    return reduce(values[: len(values) - rest], values[rest:]) if rest else values


def _thin_repeats(hashes: Hashes, positions: Positions) -> Anchors:
    """Thin chains of one hash repeated within a window, which only text of a period below `WINDOW_GRAMS` has.

    Of a chain stay the ends, so that what surrounds it keeps its alignment, and about one anchor per window between.
    """
    chained = (hashes[1:] == hashes[:-1]) & (np.diff(positions) < WINDOW_GRAMS)
    if not chained.any():
        return Anchors(hashes, positions)
    is_head = np.concatenate([[True], ~chained])
    is_tail = np.concatenate([~chained, [True]])
    head = positions[is_head][np.cumsum(is_head) - 1]
    stride = (positions - head) // WINDOW_GRAMS
    kept = is_head | is_tail | np.concatenate([[True], stride[1:] != stride[:-1]])
    return Anchors(hashes[kept], positions[kept])
