"""The host's copies of what a tree holds: of the slots of nodes, or of states."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.radix.invariants import require, require_owned, require_unique
from kvgraft.prefix.radix.node import frozen_copy
from kvgraft.prefix.results import NO_SLOTS, SlotArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence, Set

    from kvgraft.prefix.component.node import ComponentNode
    from kvgraft.prefix.eviction.policies import EvictionKey
    from kvgraft.prefix.hierarchical.transfer import TierTransfer
    from kvgraft.prefix.ssm.state import State

logger = logging.getLogger(__name__)

Item = TypeVar("Item", bound="ComponentNode[Any] | State")


class HostCopies(Generic[Item]):
    """Makes, pins and frees the copies of items of one kind. Knows no tree: which of them may leave is the tree's to say.

    Attributes:
        transfer: Mover between the tiers.
        size: What the copies count for: tokens, or states.
        queue: Items on the host only that can leave; an item on the device waits in another queue.
        num_failed: Transfers that raised; each left everything as it was.
    """

    def __init__(self, transfer: TierTransfer, order: Callable[[Item], EvictionKey]) -> None:
        self.transfer = transfer
        self.size = 0
        self.num_failed = 0
        self.queue: EvictionQueue[Item] = EvictionQueue(order)

    def backup(self, item: Item, make_room: Callable[[int], bool]) -> bool:
        """Copy an item to the host, `make_room` called once if there is none; False, with nothing changed, if that fails."""
        slots = item.kv_indices
        told = f"backup of {len(slots)} device slots failed; what they hold stays without a copy"
        host_indices = self._transferred(self.transfer.backup, slots, told)
        if host_indices is None and make_room(len(slots)):
            host_indices = self._transferred(self.transfer.backup, slots, told)
        if host_indices is None:
            return False
        if len(host_indices) != len(slots):
            raise ConfigError(f"backup returned {len(host_indices)} host slots for {len(slots)}; one per slot or None")
        item.host_indices = frozen_copy(host_indices)
        self.size += len(slots)
        return True

    def load(self, host_slots: SlotArray) -> SlotArray | None:
        """Copy host slots to the device; None if there is no room or it fails."""
        if not len(host_slots):
            return NO_SLOTS
        told = f"load-back of {len(host_slots)} host slots failed; they are computed instead"
        return self._transferred(self.transfer.load, host_slots, told)

    def _transferred(
        self, copy: Callable[[SlotArray], SlotArray | None], slots: SlotArray, told: str
    ) -> SlotArray | None:
        try:
            return copy(slots)
        except Exception:
            self.num_failed += 1
            logger.exception("%s", told)
            return None

    def free(self, item: Item) -> None:
        """Forget the copy of an item that has one."""
        self.withdraw(item)
        self.size -= len(item)
        self.transfer.free_host(item.host_indices)
        item.host_indices = NO_SLOTS

    def withdraw(self, item: Item) -> None:
        """Let an item that waits here leave no more."""
        if item.queue_index >= 0 and not item.on_device:
            self.queue.remove(item)

    def pin(self, items: Iterable[Item]) -> SlotArray:
        """Keep copies while a load-back reads them; returns their host slots."""
        slots = [NO_SLOTS]
        for item in items:
            item.host_locks += 1
            self.withdraw(item)
            slots.append(item.host_indices)
        return np.concatenate(slots)

    def unpin(self, item: Item) -> None:
        """Give back a pin of an item that may leave whenever it lies on the host only."""
        item.host_locks -= 1
        self.wait(item)

    def wait(self, item: Item) -> None:
        """Queue an item if it lies on the host only and no load-back reads it."""
        if len(item.host_indices) and not item.on_device and not item.host_locks and item.queue_index < 0:
            self.queue.add(item)

    def check(self, copied: Sequence[tuple[ComponentNode[Any], Item]], waiting: Set[Item]) -> None:
        """Verify the copies, given by node, and that exactly the items wait that should; raises `CorruptCacheError`."""
        self.queue.check()
        for _, item in copied:
            require(len(item.host_indices) == len(item), "there is not one host slot for each of the device")
            require(item.host_locks >= 0, "host_locks is negative")
            require_owned(item.host_indices)
        require_unique((node, item.host_indices) for node, item in copied)
        require(waiting == set(self.queue), "the host queue does not hold exactly the unread leaves, or states")
        size = sum(len(item) for _, item in copied)
        require(size == self.size, f"{size} tokens or states have copies, counted as {self.size}")

    def clear(self) -> None:
        """Forget all copies of items that the tree has dropped; their slots are freed by the caller."""
        self.queue.clear()
        self.size = 0

    def rebuild(self) -> None:
        """Forget all copies without looking at them."""
        self.queue.rebuild()
        self.size = 0
