"""Tree of two tiers: copies to the host, eviction from both, inserts that bring KV back."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.hierarchical.invariants import check_tiered_tree
from kvgraft.prefix.hierarchical.node import TieredNode
from kvgraft.prefix.hierarchical.transfer import (
    HOST_MEDIUM,
    WRITE_POLICIES,
    TieredMatchResult,
    TierTransfer,
)
from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.node import frozen_copy
from kvgraft.prefix.results import (
    NO_SLOTS,
    EvictResult,
    InsertResult,
    MatchResult,
    PrefixHandle,
    SlotArray,
    StoredLength,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from kvgraft.prefix.radix.base import TreeOptions
    from kvgraft.token_key import RadixKey

logger = logging.getLogger(__name__)


Node = TypeVar("Node", bound=TieredNode)


class BaseTieredCache(BaseRadixCache[Node]):
    """Base of caches over two tiers: all but load-backs.

    Invariants (verified by `check`), besides those of a radix tree:
        - A node lies on the device, on the host, or both; the parent of a node on the device lies there too.
        - The device queue holds the unlocked nodes on the device without children there, and nothing else.
        - The host queue holds the childless nodes that lie on the host only and that no load-back reads.
        - No slot of either tier is stored twice; `host_size` counts the copies.

    Attributes:
        num_failed_transfers: Transfers that raised; each left the tree as it was.
    """

    def __init__(
        self,
        page_size: int = 1,
        *,
        transfer: TierTransfer,
        write_policy: str = "write_through",
        **options: Unpack[TreeOptions],
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: Tokens per page.
            transfer: Moves KV between the tiers.
            write_policy: When copies are made: a name in `WRITE_POLICIES`.
            options: As of `BaseRadixCache`; the policy orders both tiers.
        """
        if write_policy not in WRITE_POLICIES:
            raise ConfigError(f"unknown write policy {write_policy!r}; there are {', '.join(WRITE_POLICIES)}")
        super().__init__(page_size, **options)
        self.num_failed_transfers = 0
        self._transfer = transfer
        self._backup_after = WRITE_POLICIES[write_policy]
        self._host_queue: EvictionQueue[Node] = EvictionQueue(self.policy)
        self._host_size = 0

    @property
    def transfer(self) -> TierTransfer:
        """Mover of KV between the tiers."""
        return self._transfer

    @property
    def host_size(self) -> int:
        """Tokens that have a copy on the host."""
        return self._host_size

    # lookup and insert

    def _match_prefix_exact(self, key: RadixKey) -> MatchResult:
        """Match the device part and say how much further the host reaches."""
        root = self._tree.root
        if self._disabled:
            return MatchResult([], 0, root)
        path, last = self._walk(key, root, key.aligned_len(self._page_size))
        device = [node for node in path if node.on_device]
        end = device[-1] if device else root
        parts = [node.kv_indices for node in device]
        return TieredMatchResult(parts, end, last)

    def _stored_in(self, path: list[Node], stop: int) -> StoredLength:
        on_device = max((node.end for node in path if node.on_device), default=0)
        return StoredLength(min(on_device, stop), max(0, stop - on_device))

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
    ) -> InsertResult:
        """Store as `RadixCache.insert`; what lies on the host only takes device slots from the insert.

        Raises:
            CorruptCacheError: `after` lies on the host only or was dropped.
        """
        if after is not None:
            self._require_device(self._tree.resolve(after))
        result = super().insert(key, kv_indices, after=after, priority=priority, counted_len=counted_len)
        if self._backup_after is not None and not self._disabled:
            self._write_through(self._tree.resolve(result.handle))
        return result

    def _stored_len(self, node: Node, path: list[Node], slots: SlotArray) -> int:
        missing = [step for step in path if not step.on_device]
        for step in missing:
            self._revive(step, slots[step.start : step.end])
        return missing[0].start if missing else node.end

    def _revive(self, node: Node, kv_indices: SlotArray) -> None:
        """Give a node that lies on the host only device slots again; its parent lies on the device."""
        parent = node.parent
        assert parent is not None, "the root is never on the host"
        if node.queue_index >= 0:
            self._host_queue.remove(node)
        if parent.queue_index >= 0:
            self._queue.remove(parent)
        parent.device_children += 1
        node.kv_indices = frozen_copy(kv_indices)
        self._evictable_size += len(node)
        self._queue_if_candidate(node)
        if self._events is not None:
            self._events.stored(node, self._page_size)

    def _add_node(
        self, parent: Node, key: RadixKey, slots: SlotArray, stop: int, priority: int, *, hit_count: int
    ) -> Node:
        parent.device_children += 1
        return super()._add_node(parent, key, slots, stop, priority, hit_count=hit_count)

    def _walk(self, key: RadixKey, start: Node, length: int) -> tuple[list[Node], Node]:
        path, last = super()._walk(key, start, length)
        for node in path:  # candidates have children here, those that lie on the host only
            node.last_access = last.last_access
            self._requeue(node)
        return path, last

    def _credit(self, start: Node, path: list[Node], total_len: int, priority: int, counted_len: int) -> None:
        super()._credit(start, path, total_len, priority, counted_len)
        for node in path:
            node.priority = max(node.priority, priority)
            node.reach = max(node.reach, total_len)
            self._requeue(node)

    def _requeue(self, node: Node) -> None:
        if node.queue_index >= 0:
            (self._queue if node.on_device else self._host_queue).update(node)

    def _queue_if_candidate(self, node: Node) -> None:
        if node.queue_index >= 0 or node.parent is None:
            return
        if node.on_device:
            if not node.device_children and not node.lock_ref:
                self._queue.add(node)
        elif not node.children and not node.host_locks:
            self._host_queue.add(node)

    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """Keep a prefix on the device from eviction.

        Raises:
            CorruptCacheError: The handle is stale, or its prefix lies on the host only.
        """
        self._require_device(self._tree.resolve(handle))
        return super().inc_lock_ref(handle)

    def _require_device(self, node: Node) -> None:
        if node.parent is not None and not node.on_device:
            raise CorruptCacheError("the prefix lies on the host only: load it back first")

    # copies on the host

    def _write_through(self, last: Node) -> None:
        """Copy the nodes up to `last` that were used often enough and have no copy yet."""
        assert self._backup_after is not None
        step: Node | None = last
        while step is not None and step.parent is not None and not step.on_host:
            if step.hit_count >= self._backup_after:
                self._backup(step)
            step = step.parent

    def _backup(self, node: Node) -> bool:
        """Copy a node to the host, making room there once; False, with nothing changed, if that fails."""
        host_indices = self._try_backup(node)
        if host_indices is None and self._evict_host(len(node)):
            host_indices = self._try_backup(node)
        if host_indices is None:
            return False
        if len(host_indices) != len(node):
            raise ConfigError(f"backup returned {len(host_indices)} host slots for {len(node)}; one per slot or None")
        node.host_indices = frozen_copy(host_indices)
        self._host_size += len(node)
        if self._events is not None:
            self._events.stored(node, self._page_size, HOST_MEDIUM)
        return True

    def _try_backup(self, node: Node) -> SlotArray | None:
        told = f"backup of {len(node)} tokens failed; they stay without a copy"
        return self._transferred(self._transfer.backup, node.kv_indices, told)

    def _transferred(
        self, copy: Callable[[SlotArray], SlotArray | None], slots: SlotArray, told: str
    ) -> SlotArray | None:
        """Copy slots to the other tier; None if there is no room, or, counted and with a line in the log, if it fails."""
        try:
            return copy(slots)
        except Exception:
            self.num_failed_transfers += 1
            logger.exception("%s", told)
            return None

    def _evict_host(self, num_tokens: int) -> bool:
        """Drop what lies on the host only until `num_tokens` are freed there; False if nothing could be."""
        num_freed = 0
        while num_freed < num_tokens and self._host_queue:
            num_freed += self._drop_host_leaf(self._host_queue.pop())
        return num_freed > 0

    def _drop_host_leaf(self, node: Node) -> int:
        """Take out an unqueued, childless node that lies on the host only; returns how many tokens left."""
        num_tokens = len(node)
        self._free_copy(node)
        parent = self._tree.remove_leaf(node)
        parent.learn_from(node)
        self._requeue(parent)
        self._queue_if_candidate(parent)
        return num_tokens

    def _free_copy(self, node: Node) -> None:
        """Forget what the host has of a node, if it has anything."""
        if not node.on_host:
            return
        if self._events is not None:
            self._events.removed(node, HOST_MEDIUM)
        self._host_size -= len(node)
        self._transfer.free_host(node.host_indices)
        node.host_indices = NO_SLOTS

    # eviction

    def evict(self, num_tokens: int) -> EvictResult:
        """Free device slots; what has a copy on the host, or gets one now, stays there.

        Complexity: O(log n) per node plus O(tokens freed), and what the transfers cost.
        """
        return super().evict(num_tokens)

    def _drop_leaf(self, node: Node) -> None:
        """Take an unqueued node without device children off the device; its parent may become a candidate."""
        self._queue_if_candidate(self._take_off_device(node))

    def _take_off_device(self, node: Node) -> Node:
        """Take an unqueued node without device children off the device; returns its parent."""
        node.lock_ref += 1  # making room for the copy may drop children, which must not queue the node again
        keeps_copy = self._keeps_copy(node)
        node.lock_ref -= 1
        parent = node.parent
        assert parent is not None, "the root is never queued"
        if self._events is not None:
            self._events.removed(node)
        node.kv_indices = NO_SLOTS
        parent.device_children -= 1
        if keeps_copy:
            self._queue_if_candidate(node)
        else:
            self._drop_host_subtree(node)
            self._free_copy(node)
            self._tree.remove_leaf(node)
        parent.learn_from(node)
        return parent

    def _keeps_copy(self, node: Node) -> bool:
        """Return whether a node that leaves the device lives on, copied now if it was not before."""
        return node.on_host or self._backup(node)

    def _drop_host_subtree(self, top: Node) -> None:
        """Drop what hangs on the host below a node that vanishes."""
        for node in list(top.subtree())[:0:-1]:
            if node.queue_index >= 0:
                self._host_queue.remove(node)
            self._free_copy(node)
            self._tree.remove_leaf(node)

    def reset(self) -> SlotArray:
        """Forget both tiers; host slots are freed through the transfer, device slots are returned."""
        copies = [node.host_indices for node in self._tree.root.subtree() if node.on_host]
        self._host_queue.clear()
        self._host_size = 0
        freed = super().reset()
        if copies:
            self._transfer.free_host(np.concatenate(copies))
        return freed

    def rebuild(self) -> None:
        """See `PrefixCache.rebuild`; the owner frees the host slots, too."""
        self._host_queue.rebuild()
        self._host_size = 0
        super().rebuild()

    # invariants

    def check(self) -> None:
        """Verify every invariant; for tests and idle time. Raises `CorruptCacheError`."""
        self._queue.check()
        self._host_queue.check()
        sizes = check_tiered_tree(self._tree.root, self._page_size, set(self._queue), set(self._host_queue))
        counted = (self._evictable_size, self._protected_size, self._host_size)
        if sizes != counted:
            raise CorruptCacheError(f"evictable, protected and host tokens are {sizes}, counted as {counted}")
