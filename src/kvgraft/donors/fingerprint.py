"""The k-grams that stand for a text: winnowing selects them by a keyed rolling hash. Knows tokens, no donors."""

from __future__ import annotations

import hashlib
import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvgraft.donors.winnow import window_minima
from kvgraft.types import SHORTEST_RUN

GRAM_TOKENS = SHORTEST_RUN
"""Tokens per k-gram: the shortest run that can be found."""

WINDOW_GRAMS = 17
"""K-grams per winnowing window, so that every shared run of `GUARANTEED_RUN` tokens shares an anchor."""

GUARANTEED_RUN = GRAM_TOKENS + WINDOW_GRAMS - 1

_WORD = (1 << 64) - 1
_HALF = np.uint64(32)

Tokens = NDArray[np.int32]
Positions = NDArray[np.int64]
Hashes = NDArray[np.uint64]


class Anchors(NamedTuple):
    """K-grams chosen to stand for a text."""

    hashes: Hashes
    """uint64, all bits well mixed."""
    positions: Positions
    """Ascending index of the first token of each k-gram."""


class Fingerprinter:
    """Chooses anchors of token sequences under one key.

    The hash of a k-gram depends on its tokens and the key alone, so equal text has equal anchors wherever it stands:
    any two texts that share `GUARANTEED_RUN` tokens share an anchor inside them. Whoever does not know the secret can
    neither predict anchors nor aim for collisions.

    Immutable.
    """

    def __init__(self, key: bytes, secret: bytes) -> None:
        """Derive hashes from a key, which may be known (that of a namespace), and a secret of at most 64 bytes."""
        digest = hashlib.blake2b(key, digest_size=32, key=secret, person=b"kvgraft.anchors").digest()
        words = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 32, 8)]
        base, mix_1, mix_2 = (word | 1 for word in words[1:])
        self._whiten, self._mix_1, self._mix_2 = np.uint64(words[0]), np.uint64(mix_1), np.uint64(mix_2)
        self._base = base
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
        window = min(WINDOW_GRAMS, len(hashes))
        halves = _BUFFERS.halves
        order = np.right_shift(hashes, _HALF, out=halves[0, : len(hashes)], casting="unsafe")
        positions = window_minima(order, window, halves[1:])
        return _thin_repeats(self._mixed(hashes[positions]), positions)

    def passages(self, token_ids: Tokens, length: int) -> Hashes:
        """Hash every sequence of `length` tokens, at least a k-gram, all bits well mixed.

        Complexity: O(n log length), vectorised.
        """
        assert length >= GRAM_TOKENS
        if len(token_ids) < length:
            return np.empty(0, np.uint64)
        hashes, span = self.gram_hashes(token_ids), GRAM_TOKENS
        while span < length:
            # Two halves, which overlap where the length is no power of two.
            step = min(span, length - span)
            hashes = hashes[:-step] * np.uint64(pow(self._base, step, _WORD + 1)) + hashes[step:]
            span += step
        return self._mixed(hashes[: len(token_ids) - length + 1].copy())

    def _mixed(self, hashes: Hashes) -> Hashes:
        """Mix all bits in place."""
        hashes ^= hashes >> _HALF
        hashes *= self._mix_2
        hashes ^= hashes >> _HALF
        return hashes

    def gram_hashes(self, token_ids: Tokens) -> Hashes:
        """Hash every k-gram: uint64, `len(token_ids) - GRAM_TOKENS + 1` of them, of which only the upper half is mixed.

        Returns:
            A view that the next call in this thread overwrites.
        """
        if _BUFFERS.words.shape[1] < len(token_ids):
            _BUFFERS.reserve(len(token_ids))
        hashes: Hashes = _BUFFERS.words[0, : len(token_ids)]
        spare: Hashes = _BUFFERS.words[1, : len(token_ids)]
        hashes[:] = token_ids
        hashes ^= self._whiten
        hashes *= self._mix_1
        hashes ^= np.right_shift(hashes, _HALF, out=spare)
        for span, power in self._powers:
            # The polynomial of 2 * span tokens from those of its two halves.
            doubled = np.multiply(hashes[:-span], power, out=spare[:-span])
            doubled += hashes[span:]
            hashes, spare = doubled, hashes[:-span]
        return hashes


class _Buffers(threading.local):
    """Arrays of one thread for intermediate results, as long as the longest text so far.

    Allocated anew for each text, arrays of this size go back to the operating system every time, and the page faults
    cost more than the arithmetic.

    Attributes:
        words: Two rows for hashes.
        halves: Four rows for halves of hashes, a window longer than the text.
    """

    def __init__(self) -> None:
        self.reserve(0)

    def reserve(self, size: int) -> None:
        # Both or neither: there may be memory for one of them.
        self.words, self.halves = np.empty((2, size), np.uint64), np.empty((4, size + WINDOW_GRAMS), np.uint32)


_BUFFERS = _Buffers()


def _doublings(length: int) -> list[int]:
    """1, 2, 4, ... below `length`, a power of two."""
    return [1 << i for i in range(length.bit_length() - 1)]


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
