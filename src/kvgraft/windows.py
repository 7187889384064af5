"""Kinds of windows: which keys a row of a window layer reads, and so which K/V of such layers must be kept.

Two kinds are known. In a *sliding* window a row reads the last W keys, its own included; in a *chunked* one (Llama 4) it
reads the keys of its own chunk of C positions, `[floor(p / C) * C, p]`. Everything that prefix caches, engines and attention
backends need to know about a kind is asked here, so that none of them distinguishes the kinds.

Positions may be numbers, numpy arrays or tensors where they are said to be.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_P = TypeVar("_P", bound=Any)


@dataclass(frozen=True, slots=True)
class WindowKind(ABC):
    """The keys that a row of a window layer reads.

    `first_key` and `first_needed` never fall when the position rises; all callers rely on it.

    Attributes:
        size: Keys that a row reads at most, its own included.
    """

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"a window has at least 1 token, not {self.size}")

    @abstractmethod
    def first_key(self, position: _P) -> _P:
        """The first key that the row at `position` (number, array or tensor) reads; below 0 means all from 0 on."""

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """Return the first position of the window K/V that a prefix of `num_tokens` needs, for rows after it to be computed.

        `num_tokens` itself where it needs none. What it says may include positions that no row reads, never fewer.
        """

    @abstractmethod
    def boundary(self, stop: int, page_size: int) -> int:
        """The last page boundary up to `stop` across which no row reads; 0 if there is none but the start."""

    @abstractmethod
    def stretch_end(self, position: int) -> int:
        """Return the end of the rows from `position` on that share one mask, moved along: that of `band`."""

    @property
    @abstractmethod
    def band(self) -> int | None:
        """Keys that each row of a stretch reads at most; None if it reads all from the first key of the stretch on."""

    def frontier(self, num_tokens: int, page_size: int) -> int:
        """Position below which a sequence of `num_tokens` gives its window K/V up, in whole pages.

        What stays is enough for its whole pages to be matched again, and at least one page, so that a tree keeps a leaf that
        is alive: with pages of 8, a window of 2 and 10 tokens, `floor(10 - 2)` would be the whole leaf `[0, 8)`.
        """
        stored = num_tokens - num_tokens % page_size
        frontier = max(0, min(self.first_needed(stored), stored - page_size))
        return frontier - frontier % page_size


@dataclass(frozen=True, slots=True)
class SlidingWindow(WindowKind):
    """The last `size` keys, the row's own included (Mistral, Gemma, gpt-oss)."""

    def first_key(self, position: _P) -> _P:
        """See `WindowKind`."""
        first: _P = position - self.size + 1
        return first

    def first_needed(self, num_tokens: int) -> int:
        """A whole window, one token more than the next row reads: as SGLang's `SWARadixCache` has it."""
        return max(0, num_tokens - self.size)

    def boundary(self, stop: int, page_size: int) -> int:
        """Every row looks back, but the first of all."""
        return 0

    def stretch_end(self, position: int) -> int:
        """One mask moves along with all rows."""
        return sys.maxsize

    @property
    def band(self) -> int | None:
        """The window."""
        return self.size

    def __str__(self) -> str:
        return f"windows of {self.size} tokens"


@dataclass(frozen=True, slots=True)
class ChunkedWindow(WindowKind):
    """The keys of the row's own chunk of `size` positions up to the row (Llama 4): nothing is read across a border."""

    def first_key(self, position: _P) -> _P:
        """See `WindowKind`."""
        first: _P = position - position % self.size
        return first

    def first_needed(self, num_tokens: int) -> int:
        """The chunk that the next row is in; nothing at a border."""
        return num_tokens - num_tokens % self.size

    def boundary(self, stop: int, page_size: int) -> int:
        """The last border of a chunk that is one of a page, too."""
        return stop - stop % math.lcm(self.size, page_size)

    def stretch_end(self, position: int) -> int:
        """Within a chunk the mask is causal."""
        return position - position % self.size + self.size

    @property
    def band(self) -> int | None:
        """None: a chunk is read from its beginning."""
        return None

    def __str__(self) -> str:
        return f"chunks of {self.size} tokens"


def widest(windows: Iterable[WindowKind | None]) -> WindowKind | None:
    """The kind that keeps what all `windows` of a model's layers read; None if none of them has any.

    Raises:
        ConfigError: There are windows of several kinds, or chunks of several sizes: none of them keeps what the others read.
    """
    found = {window for window in windows if window is not None}
    chunks = [window for window in found if not isinstance(window, SlidingWindow)]
    if chunks and len(found) > 1:
        raise ConfigError(f"layers with {' and '.join(sorted(map(str, found)))} in one model are not supported")
    return max(found, key=lambda window: window.size, default=None)


def window_kind(sliding_window_size: int | None, attention_chunk_size: int | None) -> WindowKind:
    """The kind that one of two sizes means, as configurations of models name them.

    Raises:
        ConfigError: There are none or both, or a size is below 1.
    """
    if (sliding_window_size is None) == (attention_chunk_size is None):
        raise ConfigError(
            "window layers have either a sliding_window_size or an attention_chunk_size; give one of them"
        )
    if sliding_window_size is not None:
        if sliding_window_size < 1:
            raise ConfigError(f"sliding_window_size must be at least 1, not {sliding_window_size}")
        return SlidingWindow(sliding_window_size)
    assert attention_chunk_size is not None
    if attention_chunk_size < 1:
        raise ConfigError(f"attention_chunk_size must be at least 1, not {attention_chunk_size}")
    return ChunkedWindow(attention_chunk_size)
