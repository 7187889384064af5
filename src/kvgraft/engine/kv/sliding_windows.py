"""Window slots of requests: taken piece by piece before rows are computed, given back after them.

Of a request's positions, `[start, stop)` have a window slot:

    [0, start)            given back, or never had
    [start, prefix_len)   of the cached prefix; kept with the lock on its window until the request is past it
    [.., stop)            the request's own: computed, about to be computed, or grafted

A row at position p reads the K/V of window layers from the first key of its window on (`kvgraft.windows`: `p - W + 1`, or the
beginning of its chunk) and nowhere else. So, while positions are computed in ascending order, no row needs a slot below the
frontier of what is computed. A grafted prompt is not computed in order: a policy may have any reused token computed again,
whose row looks one window back. It holds the slots of all its positions until its prompt is computed.

Where the prefix cache has pages, windows are given back in whole pages, and one page later (`WindowKind.frontier`): what is
stored of a sequence ends with a full page, and is found again only if all that it needs before that is stored, too.

The prefix cache holds window slots until room is needed. Donors hold no slots at all: theirs would be windows without
another use. Their K/V are copied to host memory when they leave the window or when the text is registered, and are grafted
from there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.kv.layer_rows import CapturedWindows, WindowRow
from kvgraft.engine.kv.layer_slots import OwnSlots
from kvgraft.engine.model.slot_plan import DECODE_TOKENS
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.memory import KVBlock, Owner
from kvgraft.prefix import SWALock, SWARadixCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.memory import HybridSlotPool, SlotUsage
    from kvgraft.prefix import EvictResult, MatchResult, SWAInsertResult
    from kvgraft.token_key import RadixKey

logger = logging.getLogger(__name__)

_MIN_PIECE_TOKENS = 512
"""A piece of prefill takes free slots, and has cached windows evicted for this many rows, or one window, at most."""
_NO_SLOTS = np.empty(0, np.int64)


class SlidingWindows(OwnSlots):
    """Slots of window layers, taken before a request's rows and given back after them. Not thread-safe.

    Invariants:
        - The request that locked a window holds its slots, so that all slots without a request can be evicted.
        - No donor holds a slot of any kind (verified by `check`, with those of `OwnSlots`).

    Attributes:
        pool: The bytes, of tokens and of windows.
    """

    _kind = "window slot"
    _prefix: SWARadixCache

    def __init__(self, space: KVSpace, pool: HybridSlotPool) -> None:
        super().__init__(space, pool.num_window_slots, pool.window.bytes_per_token)
        assert isinstance(space.prefix, SWARadixCache), "window slots are planned for a prefix cache that knows them"
        self.host_keys: set[str] = set()
        self.pool = pool
        self._prefix = space.prefix
        self._window = space.prefix.window
        self.longest_piece = self._window.size
        self._page_size = space.prefix.page_size

    def window_usage(self) -> SlotUsage:
        """See `LayerBooks.window_usage`."""
        return self.allocator.usage()

    def allocate(self, num_tokens: int, *, after: int | None = None) -> NDArray[np.int64]:
        """Give a request `num_tokens` window slots; cached windows leave where room is needed.

        Raises:
            CapacityError: There is no room to make; nothing was evicted.
        """
        if num_tokens > self.available:
            raise CapacityError(
                f"{num_tokens} slots of window layers are needed and {self.available} of {self.allocator.num_slots} "
                "are not in use by running requests; shorten the prompt or raise num_slots"
            )
        if not self._make_room(num_tokens):
            shortage = num_tokens - self.allocator.free_size
            raise CorruptCacheError(f"{shortage} window slots have no holder that could give them back")
        return self.allocator.allocate(num_tokens, after=after)

    def cut(self, key: RadixKey) -> None:
        """See `LayerBooks.cut`: where the window begins that what is stored of `key` needs.

        A lock covers whole nodes until a window is covered, and a match marks them as used. The cut, where it can be made,
        keeps that below two windows: one cached prompt would pin the whole space otherwise, and windows that no prompt reads
        any more would stay while those of other prompts leave.
        """
        length = self._prefix.look(key).prefix_len
        border = self._window.first_needed(length)
        if border < length:
            self._prefix.cut(key, border)

    def insert(
        self,
        key: RadixKey,
        slots: NDArray[np.int64],
        row: LayerRow | None,
        *,
        priority: int,
        counted_len: int,
    ) -> SWAInsertResult:
        """See `LayerBooks.insert`; the window slots that the request still holds are stored, too."""
        assert isinstance(row, WindowRow), "requests of a hybrid model have window slots"
        swa_indices = row.swa_indices[: len(slots)]
        evicted = min(row.start + -row.start % self._page_size, len(key))
        evicted -= evicted % self._page_size
        result = self._prefix.insert(
            key,
            slots,
            priority=priority,
            counted_len=counted_len,
            swa_indices=swa_indices,
            swa_evicted_len=evicted,
        )
        offered = swa_indices[evicted : result.total_len]
        self.allocator.retain(offered[~np.isin(offered, result.swa_freed)], Owner.CACHE)
        return result

    def rebuild(self) -> None:
        """See `LayerBooks.rebuild`."""
        super().rebuild()
        self.host_keys.clear()

    def check(self) -> None:
        """See `LayerBooks.check`."""
        super().check()
        if self.space.usage().donor:
            raise CorruptCacheError("a donor of a hybrid model holds slots")

    def _freed(self, result: EvictResult) -> NDArray[np.int64]:
        return result.swa_freed

    def _num_cached(self) -> int:
        return self._prefix.swa_total_size

    def adopt(
        self, match: MatchResult | None, lock: PrefixLock | None, num_tokens: int, *, is_stored: bool, is_donor: bool
    ) -> WindowRow:
        """See `LayerSlots.adopt`."""
        del is_stored  # windows are stored as they are
        swa_indices = _NO_SLOTS if match is None else match.swa_indices
        stop = len(swa_indices)
        start = stop if lock is None else window_of(lock)
        row = np.array(swa_indices, dtype=np.int64)
        row[:start] = -1
        self.allocator.retain(row[start:], Owner.REQUEST)
        return WindowRow(row, stop, start, stop, stop, is_donor)

    def widen(self, kv: RequestKV) -> None:
        """See `LayerSlots.widen`."""
        row = _row(kv)
        missing = len(kv.kv_indices) - len(row.swa_indices)
        row.swa_indices = np.concatenate([row.swa_indices, np.full(missing, -1)])

    def require_room(self, kv: RequestKV, num_tokens: int) -> None:
        """See `LayerSlots.require_room`."""
        needed = min(num_tokens - _row(kv).stop, self._window.size + DECODE_TOKENS)
        if needed > self.available:
            raise CapacityError(
                f"{needed} slots of window layers are needed and {self.available} are not in use by running "
                "requests; wait, or raise num_slots"
            )

    def fill(self, kv: RequestKV, num_tokens: int) -> None:
        """See `LayerSlots.fill`."""
        self._take(_row(kv), num_tokens)

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """See `LayerSlots.reserve`.

        Slots that the request itself no longer sees are given back first, then cached windows leave.
        """
        row = _row(kv)
        missing = int(positions[-1]) + 1 - row.stop
        if missing <= 0:
            return len(positions)
        if missing > self.allocator.free_size:
            self.advance(kv, row.stop)
            evictable = min(self.available, max(self._window.size, _MIN_PIECE_TOKENS))
            missing = min(missing, max(self.allocator.free_size, evictable))
        self._take(row, row.stop + missing)
        return int(np.searchsorted(positions, row.stop))

    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """See `LayerSlots.grow`."""
        row = _row(kv)
        missing = num_tokens - row.stop
        if missing <= 0:
            return
        # Rows that heal look one window back from the exact frontier.
        self.advance(kv, kv.lineage.exact_len(row.stop) if kv.is_healing else row.stop)
        ahead = min(max(missing, DECODE_TOKENS), len(row.swa_indices) - row.stop)
        self._take(row, row.stop + max(missing, min(ahead, self.available)))

    def advance(self, kv: RequestKV, num_computed: int) -> None:
        """See `LayerSlots.advance`."""
        row = _row(kv)
        frontier = min(self._window.frontier(num_computed, self._page_size), row.stop)
        if frontier <= row.start or frontier < row.prefix_len:
            return
        self._capture(kv, frontier)
        if row.start < row.prefix_len:
            assert kv.held.lock is not None, "a prefix is locked while its window is held"
            if kv.held.lock.epoch == self.space.epoch:
                self.space.release_forgotten(self._prefix.dec_swa_lock_only(kv.held.lock.receipt))
        self.allocator.release(row.swa_indices[row.start : frontier], Owner.REQUEST)
        row.swa_indices[row.start : frontier] = -1
        row.start = frontier

    def release(self, row: LayerRow | None) -> None:
        """See `LayerSlots.release`."""
        if not isinstance(row, WindowRow):
            return
        self._drop_captured(row)
        self.allocator.release(row.swa_indices[row.start : row.stop], Owner.REQUEST)
        row.swa_indices[:] = -1
        row.start = row.stop = 0

    def forget_captured(self, kv: RequestKV) -> None:
        """Drop what was captured so far."""
        self._drop_captured(_row(kv))

    def known_parts(self, kv: RequestKV, start: int, stop: int) -> Iterator[tuple[int, KVBlock]]:
        """Yield K/V of window layers within `[start, stop)`, captured or still in slots, run by run: position and block."""
        row = _row(kv)
        parts = [(part.start, part.stop, part.name) for part in row.captured]
        parts.append((row.start, row.stop, ""))
        run: list[KVBlock] = []
        run_start = run_stop = start
        for first, last, name in parts:
            low, high = max(first, start), min(last, stop)
            if low >= high:
                continue
            if low != run_stop and run:
                yield run_start, KVBlock.join(run)
                run = []
            if not run:
                run_start = low
            run.append(
                self.space.host.get(name, low - first, high - low)
                if name
                else self.pool.export_windows(row.swa_indices[low:high])
            )
            run_stop = high
        if run:
            yield run_start, KVBlock.join(run)

    def _drop_captured(self, row: WindowRow) -> None:
        for part in row.captured:
            self.space.host.remove(part.name)
            self.host_keys.discard(part.name)
        row.captured.clear()

    def _capture(self, kv: RequestKV, frontier: int) -> None:
        row = _row(kv)
        start = max(row.start, row.registered_len)
        if not row.is_donor or start >= frontier or kv.epoch != self.space.epoch:
            return
        name, slots = f"window layers of {kv.request.request_id} from {start}", row.swa_indices[start:frontier]
        try:
            if not self.space.make_host_room(len(slots) * self.bytes_per_slot):
                return
            if self.space.copy_to_host(name, lambda: self.pool.export_windows(slots)) is not None:
                self.host_keys.add(name)
                row.captured.append(CapturedWindows(start, frontier, name))
        except Exception as error:
            self.space.doubt(error)
            self.num_errors += 1
            logger.exception("window layers of request %s are not kept for a donor", kv.request.request_id)

    def _take(self, row: WindowRow, stop: int) -> None:
        if stop <= row.stop:
            return
        after = int(row.swa_indices[row.stop - 1]) if row.stop > row.start else None
        row.swa_indices[row.stop : stop] = self.allocate(stop - row.stop, after=after)
        row.stop = stop


def window_of(lock: PrefixLock) -> int:
    """First position of the window that a lock on a hybrid tree covers."""
    assert isinstance(lock.receipt, SWALock), "only hybrid trees lock windows"
    return lock.receipt.swa_start


def _row(kv: RequestKV) -> WindowRow:
    assert kv.windows is not None, "requests of a hybrid model have window slots"
    return kv.windows
