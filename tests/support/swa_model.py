"""A hybrid prefix cache next to a token-level oracle: every operation goes to both, and they must agree.

The oracle keeps one entry per stored page and knows no nodes, splits, queues or lock counts. It drives property tests and
the soak; a failed comparison is an `AssertionError`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix import RadixKey, SWARadixCache
from kvgraft.testing.slots import CheckedSlots
from kvgraft.windows import ChunkedWindow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.prefix import EvictResult, SlotArray
    from kvgraft.prefix.swa.window import SWALock
    from kvgraft.windows import WindowKind

Tokens = tuple[int, ...]

_UNREADABLE = -7
"""Slot offered where the cache must not read."""


@dataclass
class Page:
    """Slots of one stored page; `swa` is None once the window KV is gone."""

    full: tuple[int, ...]
    swa: tuple[int, ...] | None


@dataclass
class HeldLock:
    """A receipt and the prefix it locks."""

    receipt: SWALock
    tokens: Tokens
    swa_released: bool = False


class SWAModel:
    """A cache, pools that own its slots, and the oracle.

    Attributes:
        cache: The cache under test.
        locks: Receipts that are held.
        num_matches: Lookups compared so far.
    """

    def __init__(self, page_size: int, window: WindowKind, *, size: int = 4096, leaf_cap: bool = False) -> None:
        self.cache = cache_of(window, page_size, leaf_cap=leaf_cap)
        self.locks: list[HeldLock] = []
        self.num_matches = 0
        self._page_size = page_size
        self._window = window
        self._full = CheckedSlots(size)
        self._swa = CheckedSlots(size, first=10_000_000)
        self._pages: dict[Tokens, Page] = {}

    # operations

    def match(self, tokens: Tokens, *, lock: bool = False) -> int:
        """Look up, compare with the oracle, perhaps lock; returns the length."""
        result = self.cache.match_prefix(RadixKey(np.array(tokens, dtype=np.int64)))
        self.num_matches += 1
        expected = self._matched(tokens)
        assert result.prefix_len == expected, f"matched {result.prefix_len} tokens, the oracle {expected}"
        pages = [self._pages[prefix] for prefix in self._prefixes(tokens[:expected])]
        assert result.kv_indices.tolist() == [slot for page in pages for slot in page.full]
        gone = (-1,) * self._page_size
        assert result.swa_indices.tolist() == [slot for page in pages for slot in page.swa or gone]
        if lock:
            self.locks.append(HeldLock(self.cache.inc_lock_ref(result.handle), tokens[:expected]))
        return expected

    def insert(self, tokens: Tokens, evicted: int, held: HeldLock | None = None, *, lock: bool = False) -> None:
        """Store, with window slots from `evicted` on; after a held lock like a request that runs on it."""
        tokens = tokens if held is None else held.tokens + tokens
        self._make_room(len(tokens))
        start = 0 if held is None else len(held.tokens)
        evicted = max(min(evicted, len(tokens)), start) // self._page_size * self._page_size
        full, swa = self._rows(tokens, start, evicted)
        result = self.cache.insert(
            RadixKey(np.array(tokens, dtype=np.int64)),
            full,
            after=None if held is None else held.receipt,
            swa_indices=swa,
            prev_prefix_len=start,
            swa_evicted_len=evicted,
        )
        freed, swa_freed, total_len = self._apply_insert(tokens, full, swa, start, evicted)
        assert result.total_len == total_len
        assert sorted(result.freed.tolist()) == sorted(freed)
        assert sorted(result.swa_freed.tolist()) == sorted(swa_freed)
        self._full.free(np.concatenate([result.freed, full[max(total_len, start) :]]))
        self._swa.free(np.concatenate([result.swa_freed, swa[max(total_len, evicted) :]]))
        if lock:
            self.locks.append(HeldLock(self.cache.lock_inserted(result.handle), tokens[:total_len]))

    def evict(self, num_tokens: int, swa_num_tokens: int) -> None:
        """Evict from both pools; nothing locked may go, and enough must."""
        cache = self.cache
        evictable, swa_evictable = cache.evictable_size, cache.swa_evictable_size
        result = cache.evict(num_tokens, swa_num_tokens)
        assert len(result.freed) >= min(num_tokens, evictable)
        assert len(result.swa_freed) >= min(swa_num_tokens, swa_evictable)
        self._forget(result)

    def unlock(self, held: HeldLock) -> None:
        """Give a lock back."""
        self.locks.remove(held)
        self._forget(self.cache.dec_lock_ref(held.receipt))

    def release_window(self, held: HeldLock) -> None:
        """Release the window of a lock early."""
        held.swa_released = True
        result = self.cache.dec_swa_lock_only(held.receipt)
        assert not len(result.freed)
        self._forget(result)

    def reset(self) -> None:
        """Forget everything on both sides; every slot must come back."""
        self.locks.clear()
        self._forget(self.cache.reset_both())
        assert not self._pages

    # comparison

    def check(self) -> None:
        """Verify the cache's own invariants, its sizes and the conservation of slots in both pools."""
        cache = self.cache
        cache.check()
        stored = len(self._pages) * self._page_size
        live = sum(page.swa is not None for page in self._pages.values()) * self._page_size
        protected = len(self._protected()) * self._page_size
        assert (cache.total_size, cache.protected_size) == (stored, protected)
        assert cache.swa_total_size == live
        assert self._full.available + cache.evictable_size + cache.protected_size == self._full.size
        assert self._swa.available + cache.swa_evictable_size + cache.swa_protected_size == self._swa.size
        for prefix in self._covered():
            assert self._pages[prefix].swa is not None, "a locked window was freed"

    def _matched(self, tokens: Tokens) -> int:
        """The deepest page boundary of which all that the next row's window needs is live."""
        best = 0
        live: set[int] = set()
        for number, prefix in enumerate(self._prefixes(tokens)):
            page = self._pages.get(prefix)
            if page is None:
                break
            if page.swa is not None:
                live.add(number)
            if self._needed_pages(len(prefix)) <= live:
                best = len(prefix)
        return best

    def _needed_pages(self, num_tokens: int) -> set[int]:
        return {position // self._page_size for position in needed_positions(self._window, num_tokens)}

    def _make_room(self, num_tokens: int) -> None:
        short = max(num_tokens - self._full.available, num_tokens - self._swa.available)
        if short > 0:
            self.evict(short, short)

    def _rows(self, tokens: Tokens, start: int, evicted: int) -> tuple[SlotArray, SlotArray]:
        full = np.full(len(tokens), _UNREADABLE)
        swa = np.full(len(tokens), _UNREADABLE)
        fresh, fresh_swa = self._full.alloc(len(tokens) - start), self._swa.alloc(len(tokens) - evicted)
        assert fresh is not None, "the pool of the model is too small"
        assert fresh_swa is not None, "the pool of the model is too small"
        full[start:], swa[evicted:] = fresh, fresh_swa
        return full, swa

    def _apply_insert(
        self, tokens: Tokens, full: SlotArray, swa: SlotArray, start: int, evicted: int
    ) -> tuple[list[int], list[int], int]:
        """Do the same to the oracle; returns duplicates of both pools and the length stored afterwards."""
        freed: list[int] = []
        swa_freed: list[int] = []
        total_len = 0
        whole = len(tokens) // self._page_size * self._page_size
        for prefix in self._prefixes(tokens):
            end = len(prefix)
            begin = end - self._page_size
            offered, offered_swa = tuple(full[begin:end].tolist()), tuple(swa[begin:end].tolist())
            page = self._pages.get(prefix)
            if page is None:
                if evicted >= whole:
                    break
                self._pages[prefix] = Page(offered, offered_swa if begin >= evicted else None)
            elif begin >= start:
                freed += offered
                if page.swa is not None:
                    swa_freed += offered_swa if begin >= evicted else ()
                elif begin >= evicted:
                    page.swa = offered_swa
            total_len = end
        return freed, swa_freed, total_len

    def _forget(self, result: EvictResult) -> None:
        """Take what the cache freed out of the oracle; it must be whole pages that nothing protects or continues."""
        freed, swa_freed = set(result.freed.tolist()), set(result.swa_freed.tolist())
        self._full.free(result.freed)
        self._swa.free(result.swa_freed)
        protected, covered = self._protected(), self._covered()
        for prefix, page in list(self._pages.items()):
            if page.swa is not None and page.swa[0] in swa_freed:
                assert prefix not in covered, "a locked window was freed"
                swa_freed.difference_update(page.swa)
                page.swa = None
            if page.full[0] in freed:
                assert prefix not in protected, "a locked prefix was freed"
                assert page.swa is None, "full attention was freed without its window"
                freed.difference_update(page.full)
                del self._pages[prefix]
        assert not freed, "slots were freed that the cache did not hold"
        assert not swa_freed, "window slots were freed that the cache did not hold"
        for prefix in self._pages:
            assert len(prefix) == self._page_size or prefix[: -self._page_size] in self._pages, (
                "a prefix lost its beginning"
            )

    def _prefixes(self, tokens: Tokens) -> list[Tokens]:
        return [tokens[:end] for end in range(self._page_size, len(tokens) + 1, self._page_size)]

    def _protected(self) -> set[Tokens]:
        return {prefix for held in self.locks for prefix in self._prefixes(held.tokens)}

    def _covered(self) -> set[Tokens]:
        """Pages of the last window of each lock, as far as they were live when it was taken."""
        return {prefix for held in self.locks if not held.swa_released for prefix in self._window_of(held)}

    def _window_of(self, held: HeldLock) -> Iterable[Tokens]:
        needed = self._needed_pages(len(held.tokens))
        prefixes = enumerate(self._prefixes(held.tokens))
        return [prefix for number, prefix in prefixes if number in needed and len(prefix) > held.receipt.swa_start]


def cache_of(window: WindowKind, page_size: int = 1, *, leaf_cap: bool = False) -> SWARadixCache:
    """An empty cache for a kind of window."""
    if isinstance(window, ChunkedWindow):
        return SWARadixCache(page_size, attention_chunk_size=window.size, leaf_cap=leaf_cap)
    return SWARadixCache(page_size, sliding_window_size=window.size, leaf_cap=leaf_cap)


@cache
def needed_positions(window: WindowKind, num_tokens: int) -> frozenset[int]:
    """Return the positions at which a prefix must have window K/V, one by one from the definition of the kind.

    Of a sliding window one more than the row after the prefix reads, as SGLang has it.
    """
    if isinstance(window, ChunkedWindow):
        return frozenset(p for p in range(num_tokens) if p // window.size == num_tokens // window.size)
    return frozenset(p for p in range(num_tokens) if num_tokens - p <= window.size)
