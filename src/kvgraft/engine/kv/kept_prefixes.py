"""Prefixes that sessions would rather not lose. They are the last to go, and they do go: a bias, never a claim.

A hard pin for every session would fill the pool and stop the requests that need room (SGLang #18941, reverted).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from collections.abc import Hashable, KeysView

    from numpy.typing import NDArray

    from kvgraft.prefix import PrefixHandle, SlotArray

SHARE = 0.5
"""Slots that are kept at most. The other half is for prefixes and donors of requests without a session: with more, idle
sessions would leave them nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixLock:
    """A lock on a stored prefix; one of an earlier `epoch` of the space holds nothing any more."""

    receipt: PrefixHandle
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class KeptPrefix:
    """K/V of a token sequence.

    Attributes:
        stored_len: The first so many are the prefix cache's, under `lock`; the rest fills no page of it.
        lock: On the stored part.
    """

    key: RadixKey
    slots: SlotArray
    stored_len: int
    lock: PrefixLock

    @property
    def tail(self) -> SlotArray:
        """Slots that the prefix cache does not hold."""
        return self.slots[self.stored_len :]


class KeptPrefixes:
    """Prefixes by session, the least recently used first. The owner of the slots locks and releases.

    Invariant (verified by `check`): `num_slots` counts the distinct slots kept.
    """

    def __init__(self, num_slots: int) -> None:
        self.max_slots = int(num_slots * SHARE)
        self.num_slots = 0
        self._kept: OrderedDict[Hashable, KeptPrefix] = OrderedDict()
        self._uses: NDArray[np.int32] = np.zeros(num_slots, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def names(self) -> KeysView[Hashable]:
        """Sessions that something is kept for."""
        return self._kept.keys()

    @property
    def locks(self) -> list[PrefixLock]:
        """Locks on the stored parts."""
        return [kept.lock for kept in self._kept.values()]

    @property
    def num_tail_slots(self) -> int:
        """Slots of all tails."""
        return sum(len(kept.tail) for kept in self._kept.values())

    def add(self, name: Hashable, kept: KeptPrefix) -> None:
        """Keep under a name that is not in use."""
        assert name not in self._kept
        self._kept[name] = kept
        self._entered(kept)

    def pop(self, name: Hashable) -> KeptPrefix | None:
        """Take out what is kept under `name`."""
        return self._left(self._kept.pop(name, None))

    def pop_oldest(self) -> KeptPrefix | None:
        """Take out what was used least recently."""
        return self._left(self._kept.popitem(last=False)[1] if self._kept else None)

    def tail_behind(self, name: Hashable, key: RadixKey, prefix_len: int) -> SlotArray:
        """Slots that continue a match of `prefix_len` tokens of `key` beyond the prefix cache's whole pages; maybe none."""
        kept = self._kept.get(name)
        if kept is None or kept.stored_len != prefix_len or kept.key.namespace != key.namespace:
            return np.empty(0, np.int64)
        self._kept.move_to_end(name)
        shared = kept.key.match(key)
        return kept.slots[prefix_len : max(prefix_len, shared)]

    def cut_tails(self, slots: SlotArray) -> list[SlotArray]:
        """Keep no tail that has any of `slots`, which the prefix cache has taken over; returns the tails, the caller's now.

        Complexity: O(kept prefixes) where there are tails.
        """
        cut = []
        for name, kept in self._kept.items():
            if len(kept.tail) and np.isin(kept.tail, slots).any():
                key = RadixKey(kept.key.token_ids[: kept.stored_len], kept.key.extra_key, kept.key.cache_salt)
                self._left(kept)
                self._kept[name] = stored = replace(kept, key=key, slots=kept.slots[: kept.stored_len])
                self._entered(stored)
                cut.append(kept.tail)
        return cut

    def rebuild(self) -> None:
        """Forget all without a look at the counts, which may be wrong; their owner gives locks and slots back as a whole."""
        self._kept.clear()
        self._uses.fill(0)
        self.num_slots = 0

    def check(self) -> None:
        """Verify the invariant; for tests and idle time.

        Raises:
            CorruptCacheError: It does not hold.
        """
        uses = np.zeros_like(self._uses)
        for kept in self._kept.values():
            uses[kept.slots] += 1
        if not np.array_equal(uses, self._uses) or self.num_slots != int((uses > 0).sum()):
            raise CorruptCacheError(f"{int((uses > 0).sum())} slots are kept for sessions, counted as {self.num_slots}")

    def _entered(self, kept: KeptPrefix) -> None:
        self._uses[kept.slots] += 1
        self.num_slots += int((self._uses[kept.slots] == 1).sum())

    def _left(self, kept: KeptPrefix | None) -> KeptPrefix | None:
        if kept is not None:
            self._uses[kept.slots] -= 1
            self.num_slots -= int((self._uses[kept.slots] == 0).sum())
        return kept
