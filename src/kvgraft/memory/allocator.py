"""Owners of KV slots: hands slots out, counts references by kind of owner, and takes them back at zero.

Knows numbers only, no tensors; `pool.py` holds the bytes. Needs numpy alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory.extents import FreeExtents, SlotArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


class Owner(IntEnum):
    """Kinds of holders of a slot, the most pressing first."""

    REQUEST = 0
    CACHE = 1
    DONOR = 2


_FREE = len(Owner)
"""The class of a slot without a holder, after those of the owners."""


@dataclass(frozen=True, slots=True)
class SlotUsage:
    """Slots by use. Each is counted once, under the first that holds it of: request, cache, donor.

    Invariant: `free + request + cached + donor == total`.

    Attributes:
        free: Without a holder.
        request: Held by a request, and perhaps by others.
        cached: Held by the prefix cache and by no request.
        donor: Held by donors alone.
        total: All slots.
    """

    free: int
    request: int
    cached: int
    donor: int
    total: int


class SlotAllocator:
    """Reference-counted slots `0 .. num_slots - 1`.

    A slot is free when no owner holds a reference. Slots are passed as 1-D int64 arrays of distinct indices; a
    duplicate in one call is an error, because one sequence never has one slot twice. A call that raises has changed
    nothing. Not thread-safe.

    Invariants (verified by `check`):
        - The free extents are exactly the slots without references.
        - `usage()` counts every slot once.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ConfigError(f"num_slots must be at least 1, not {num_slots}")
        self._num_slots = num_slots
        self._refs: NDArray[np.int32] = np.zeros((len(Owner), num_slots), dtype=np.int32)
        self._class_sizes: NDArray[np.int64] = np.zeros(len(Owner) + 1, dtype=np.int64)
        self._scratch = np.empty(num_slots, dtype=np.int64)
        self.rebuild()

    def rebuild(self) -> None:
        """Free all slots without a look at the counts, which may be wrong; what holders still name is not theirs any more."""
        self._extents = FreeExtents(self._num_slots)
        self._refs.fill(0)
        self._class_sizes.fill(0)
        self._class_sizes[_FREE] = self._num_slots

    @property
    def num_slots(self) -> int:
        """Slots of the pool, free and held."""
        return self._num_slots

    @property
    def free_size(self) -> int:
        """Slots that `allocate` can still give."""
        return int(self._class_sizes[_FREE])

    @property
    def num_free_runs(self) -> int:
        """Runs in which the free slots lie; one when nothing is fragmented."""
        return len(self._extents)

    def allocate(self, num_tokens: int, *, after: int | None = None) -> SlotArray:
        """Take free slots for a request, one `REQUEST` reference each.

        Prefers the slots right after `after`, then one run that holds all the rest (the tightest), then the fewest
        runs. The part that follows `after` comes first; the rest ascends.

        Args:
            num_tokens: How many; zero is allowed.
            after: The last slot of a sequence that grows, to keep it in one run.

        Returns:
            int64 `(num_tokens,)`, the caller's to release.

        Complexity: O(e) for e free runs (not slots), vectorised.

        Raises:
            CapacityError: Fewer are free.
        """
        if num_tokens < 0:
            raise ConfigError(f"num_tokens must not be negative, not {num_tokens}")
        if num_tokens > self.free_size:
            raise CapacityError(f"{num_tokens} KV slots asked for, {self.free_size} free: evict, or enlarge the pool")
        if not num_tokens:
            return np.empty(0, dtype=np.int64)
        with self._extents.undone_on_failure():
            slots = np.empty(0, dtype=np.int64) if after is None else self._extents.take_at(after + 1, num_tokens)
            if len(slots) < num_tokens:
                slots = np.concatenate([slots, self._extents.take(num_tokens - len(slots))])
            sizes = self._class_sizes.copy()
            sizes[_FREE] -= num_tokens
            sizes[Owner.REQUEST] += num_tokens
            self._refs[Owner.REQUEST, slots] = 1
            self._class_sizes = sizes
        return slots

    def retain(self, slots: SlotArray, owner: Owner) -> None:
        """Add one reference by `owner` to each of `slots`, all of which are held already.

        Complexity: O(len(slots)), vectorised.

        Raises:
            ConfigError: `slots` are not distinct indices of this allocator.
            CorruptCacheError: One of them is free.
        """
        slots = self._as_slots(slots)
        classes = self._classes(slots)
        if (classes == _FREE).any():
            raise CorruptCacheError(f"slot {slots[classes == _FREE][0]} is free and cannot be retained")
        self._change(slots, classes, {owner: self._refs[owner][slots] + 1})

    def release(self, slots: SlotArray, owner: Owner) -> SlotArray:
        """Give back one reference by `owner` to each of `slots`.

        Returns:
            Those of `slots` that are free now, in the given order.

        Complexity: O(len(slots)), vectorised, plus O(n log n + e) for n freed slots and e free runs.

        Raises:
            ConfigError: `slots` are not distinct indices of this allocator.
            CorruptCacheError: `owner` does not hold one of them.
        """
        slots = self._as_slots(slots)
        self._require_held(slots, owner)
        return self._change(slots, self._classes(slots), {owner: self._refs[owner][slots] - 1})

    def release_each(self, slots: SlotArray, owner: Owner) -> None:
        """Give back a reference by `owner` for every time that a slot is named: a cache has it under several keys.

        Complexity: as `release`, plus O(n log n) for every time that the most frequent one does.

        Raises:
            ConfigError: `slots` are not indices of this allocator.
            CorruptCacheError: `owner` does not hold one of them as often.
        """
        while len(slots):
            distinct, first = np.unique(slots, return_index=True)
            if len(distinct) == len(slots):
                self.release(slots, owner)
                return
            self.release(distinct, owner)
            slots = np.delete(slots, first)

    def transfer(self, slots: SlotArray, source: Owner, target: Owner) -> None:
        """Turn one reference by `source` into one by `target`, for each of `slots`; nothing is freed.

        Complexity: O(len(slots)), vectorised.

        Raises:
            ConfigError: `slots` are not distinct indices of this allocator.
            CorruptCacheError: `source` does not hold one of them.
        """
        slots = self._as_slots(slots)
        self._require_held(slots, source)
        if source is not target:
            changed = {target: self._refs[target][slots] + 1, source: self._refs[source][slots] - 1}
            self._change(slots, self._classes(slots), changed)

    def usage(self) -> SlotUsage:
        """Count the slots by use. Complexity: O(1)."""
        request, cached, donor, free = (int(size) for size in self._class_sizes)
        return SlotUsage(free=free, request=request, cached=cached, donor=donor, total=self._num_slots)

    def num_held(self, owner: Owner) -> int:
        """Slots that `owner` holds, others' too. O(num_slots): for checks and reports."""
        return int(np.count_nonzero(self._refs[owner]))

    def num_references(self, owner: Owner) -> int:
        """References of `owner` to all slots together. O(num_slots): for checks and reports."""
        return int(self._refs[owner].sum())

    def num_counted(self, slots: SlotArray, owner: Owner) -> int:
        """Count `slots` under `owner`; for donors, those without another holder. O(slots)."""
        return int(np.count_nonzero(self._classes(slots) == owner))

    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Complexity: O(num_slots).

        Raises:
            CorruptCacheError: The first one that does not hold.
        """
        if (self._refs < 0).any():
            raise CorruptCacheError("a slot has a negative reference count")
        classes = self._classes(np.arange(self._num_slots))
        if not np.array_equal(np.bincount(classes, minlength=_FREE + 1), self._class_sizes):
            raise CorruptCacheError("the counts of free, request, cached and donor slots are wrong")
        self._extents.check()
        if not np.array_equal(np.flatnonzero(classes == _FREE), self._extents.slots()):
            raise CorruptCacheError("the free extents are not the slots without references")

    def _as_slots(self, slots: SlotArray) -> SlotArray:
        """Refuse what are not distinct indices. O(len(slots)): of duplicates only the last leaves its mark."""
        array = np.asarray(slots)
        if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
            raise ConfigError(f"slots must be 1-D integers, not {array.ndim}-D {array.dtype}")
        distinct = array.astype(np.int64, copy=False)
        if len(distinct) and (distinct.min() < 0 or distinct.max() >= self._num_slots):
            raise ConfigError(f"slots must lie in [0, {self._num_slots})")
        order = np.arange(len(distinct))
        self._scratch[distinct] = order
        if not np.array_equal(self._scratch[distinct], order):
            raise ConfigError("slots must be distinct within one call")
        return distinct

    def _require_held(self, slots: SlotArray, owner: Owner) -> None:
        missing = self._refs[owner][slots] == 0
        if missing.any():
            raise CorruptCacheError(f"slot {slots[missing][0]} is not held by {owner.name}")

    def _classes(self, slots: SlotArray, changed: Mapping[Owner, NDArray[np.int32]] | None = None) -> NDArray[np.int64]:
        """The first owner that holds each slot, or `_FREE`; with the counts of some owners `changed`."""
        classes = np.full(len(slots), _FREE, dtype=np.int64)
        for owner in reversed(Owner):
            refs = self._refs[owner][slots] if changed is None or owner not in changed else changed[owner]
            classes[refs > 0] = owner
        return classes

    def _change(
        self, slots: SlotArray, before: NDArray[np.int64], changed: Mapping[Owner, NDArray[np.int32]]
    ) -> SlotArray:
        """Give `slots`, which were of the classes `before`, other counts of some owners; returns those that are free now.

        All that needs memory comes first, so that a failure has changed nothing.
        """
        after = self._classes(slots, changed)
        sizes = self._class_sizes + np.bincount(after, minlength=_FREE + 1) - np.bincount(before, minlength=_FREE + 1)
        freed: SlotArray = slots[after == _FREE]
        self._extents.give_back(freed)
        for owner, refs in changed.items():
            self._refs[owner, slots] = refs
        self._class_sizes = sizes
        return freed
