"""Tree of two tiers: copies to the host, eviction from both, inserts that bring KV back.

Nodes may have states, or none do: a tree of tokens alone is one in which every node is of use without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.component.node import ComponentNode
from kvgraft.prefix.hierarchical.copies import HostCopies
from kvgraft.prefix.hierarchical.transfer import HOST_MEDIUM, WRITE_POLICIES, TierTransfer
from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.invariants import check_structure, require, require_owned, require_unique
from kvgraft.prefix.radix.node import frozen_copy
from kvgraft.prefix.results import NO_SLOTS, PrefixHandle, SlotArray

if TYPE_CHECKING:
    from typing import Unpack

    from kvgraft.prefix.radix.base import TreeOptions
    from kvgraft.prefix.ssm.state import State
    from kvgraft.token_key import RadixKey

Node = ComponentNode[Any]


class BaseTieredCache(BaseRadixCache[Node]):
    """Base of caches over two tiers: all but load-backs.

    Invariants (verified by `check`), besides those of a radix tree:
        - A node lies on the device, on the host, or both; the parent of a node on the device lies there too.
        - The device queue holds the unlocked nodes on the device without children there, and nothing else.
        - The host queue holds the childless nodes that lie on the host only and that no load-back reads.
        - No slot of either tier is stored twice; `host_size` counts the copies.
    """

    _node_class = ComponentNode
    _host_states: HostCopies[State] | None = None
    """Copies of the states of nodes; None in a tree of tokens alone."""

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
        self._backup_after = WRITE_POLICIES[write_policy]
        self._host: HostCopies[Node] = HostCopies(transfer, self.policy)

    @property
    def transfer(self) -> TierTransfer:
        """Mover of KV between the tiers."""
        return self._host.transfer

    @property
    def host_size(self) -> int:
        """Tokens that have a copy on the host."""
        return self._host.size

    @property
    def num_failed_transfers(self) -> int:
        """Transfers that raised; each left the tree as it was."""
        return self._host.num_failed + (0 if self._host_states is None else self._host_states.num_failed)

    # lookup and insert

    def _walk(self, key: RadixKey, start: Node, length: int) -> tuple[list[Node], Node]:
        path, last = super()._walk(key, start, length)
        self._mark_path(path, last.last_access)
        return path, last

    def _mark_path(self, path: list[Node], now: int) -> None:
        """Mark all nodes of a path as used: candidates have children here, those that lie on the host only."""
        for node in path:
            node.last_access = now
            self._requeue(node)

    def _credit(self, start: Node, path: list[Node], total_len: int, priority: int, counted_len: int) -> None:
        super()._credit(start, path, total_len, priority, counted_len)
        for node in path:
            node.priority = max(node.priority, priority)
            node.reach = max(node.reach, total_len)
            self._requeue(node)

    def _prefix_of(self, key: RadixKey, after: PrefixHandle) -> Node:
        node = super()._prefix_of(key, after)
        if node.parent is not None and not node.on_device:
            raise _not_loaded()
        return node

    def _stored_len(self, node: Node, path: list[Node], slots: SlotArray) -> int:
        missing = [step for step in path if not step.on_device]
        for step in missing:
            self._revive(step, slots[step.start : step.end])
        return missing[0].start if missing else node.end

    def _revive(self, node: Node, kv_indices: SlotArray) -> None:
        """Give a node that lies on the host only device slots again; its parent lies on the device."""
        parent = node.parent
        assert parent is not None, "the root is never on the host"
        self._host.withdraw(node)
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

    def _requeue(self, node: Node) -> None:
        if node.queue_index >= 0:
            (self._queue if node.on_device else self._host.queue).update(node)

    def _is_leaf(self, node: Node) -> bool:
        """Return whether nothing on the device continues a node that lies there."""
        return not node.device_children

    def _queue_if_candidate(self, node: Node) -> None:
        if node.queue_index >= 0 or node.parent is None:
            return
        if node.on_device:
            if not node.device_children and not node.lock_ref:
                self._queue.add(node)
        elif not node.children and not node.host_locks:
            self._host.queue.add(node)

    def inc_lock_ref(self, handle: PrefixHandle) -> Any:  # noqa: ANN401 (the receipt of the tree)
        """Keep a prefix on the device from eviction; returns the receipt.

        Raises:
            CorruptCacheError: The handle is stale, or its prefix or the state at its end lies on the host only.
        """
        node = self._tree.resolve(handle)
        lacks_state = node.component is None and node.host_component is not None
        if node.parent is not None and (lacks_state or not node.on_device):
            raise _not_loaded()
        return super().inc_lock_ref(handle)

    # copies on the host

    def _write_through(self, last: Node) -> None:
        """Copy the nodes up to `last` that were used often enough and have no copy yet, where that is the policy."""
        least = self._backup_after
        if least is None:
            return
        step: Node | None = last
        while step is not None and step.parent is not None and not step.on_host:
            if step.hit_count >= least:
                self._backup(step)
            step = step.parent

    def _backup(self, node: Node) -> bool:
        """Copy a node to the host, making room there once; False, with nothing changed, if that fails."""
        if not self._host.backup(node, self._evict_host):
            return False
        if self._events is not None:
            self._events.stored(node, self._page_size, HOST_MEDIUM)
        return True

    def _backup_state(self, state: State) -> None:
        """Copy a state that lies on the device to the host unless it has a copy, making room there once."""
        assert self._host_states is not None, "without states there are none to copy"
        if not len(state.host_indices) and self._host_states.backup(state, self._evict_host_states):
            state.node.host_component = state

    def _evict_host(self, num_tokens: int) -> bool:
        """Drop what lies on the host only until `num_tokens` are freed there; False if nothing could be."""
        num_freed = 0
        while num_freed < num_tokens and self._host.queue:
            num_freed += self._drop_host_leaf(self._host.queue.pop())
        return num_freed > 0

    def _evict_host_states(self, _: int) -> bool:
        """Drop the state that leaves the host next, with its node if that is a leaf there; False if none can."""
        assert self._host_states is not None, "without states there are none to drop"
        if not self._host_states.queue:
            return False
        state = self._host_states.queue.first()
        node = state.node
        if node.queue_index >= 0 and not node.on_device:
            self._host.withdraw(node)
            self._drop_host_leaf(node)
        else:
            self._free_state_copy(state)
        return True

    def _drop_host_leaf(self, node: Node) -> int:
        """Take out an unqueued, childless node on the host only, and what is useless above; returns how many tokens left."""
        num_tokens = 0
        while True:
            num_tokens += len(node)
            parent = self._remove_copy(node)
            parent.learn_from(node)
            self._requeue(parent)
            self._queue_if_candidate(parent)
            if parent.parent is None or parent.on_device or not self._is_useless(parent):
                return num_tokens
            node = parent

    def _remove_copy(self, node: Node) -> Node:
        """Take a childless node that the device does not hold out of the tree, with its copies; returns its parent."""
        if node.on_host:
            if self._events is not None:
                self._events.removed(node, HOST_MEDIUM)
            self._host.free(node)
        if node.host_component is not None:
            self._free_state_copy(node.host_component)
        return self._tree.remove_leaf(node)

    def _free_state_copy(self, state: State) -> None:
        assert self._host_states is not None, "without states there are no copies"
        self._host_states.free(state)
        state.node.host_component = None

    def _is_useless(self, node: Node) -> bool:
        """Return whether the host needs a state to go on from a node, and has none at its end nor below."""
        return self._host_states is not None and node.host_component is None and not node.children

    # eviction

    def _take_out(self, node: Node) -> Node:
        """Take an unqueued node without device children off the device; returns its parent, which may be a candidate now.

        What has a copy on the host, or gets one now, stays there.
        """
        node.lock_ref += 1  # making room for the copy may drop children, which must not queue the node again
        keeps_copy = self._keeps_copy(node)
        node.lock_ref -= 1
        parent = node.parent
        assert parent is not None, "the root is never queued"
        if self._events is not None:
            self._events.removed(node)
        node.kv_indices = NO_SLOTS
        parent.device_children -= 1
        parent.learn_from(node)
        if keeps_copy:
            self._queue_if_candidate(node)
            return parent
        for each in list(node.subtree())[::-1]:  # what hangs on the host below goes along
            self._remove_copy(each)
        return parent

    def _keeps_copy(self, node: Node) -> bool:
        """Return whether a node that leaves the device is of use on the host, with copies of its tokens and its state."""
        if node.component is not None:
            self._backup_state(node.component)
        if self._is_useless(node) or not (node.on_host or self._backup(node)):
            return False
        return not self._is_useless(node)  # making room may have dropped what hung below

    def _forget(self) -> SlotArray:
        """Forget both tiers; host slots are freed through the transfers, device slots are returned."""
        nodes = list(self._tree.root.subtree())
        copies: list[tuple[HostCopies[Any], list[SlotArray]]] = [(self._host, [node.host_indices for node in nodes])]
        if self._host_states is not None:
            states = [node.host_component.host_indices for node in nodes if node.host_component is not None]
            copies.append((self._host_states, states))
        for host, _ in copies:
            host.clear()
        freed = super()._forget()
        for host, parts in copies:
            slots = np.concatenate([NO_SLOTS, *parts])
            if len(slots):
                host.transfer.free_host(slots)
        return freed

    def rebuild(self) -> None:
        """See `PrefixCache.rebuild`; the owner frees the host slots, too."""
        self._host.rebuild()
        if self._host_states is not None:
            self._host_states.rebuild()
        super().rebuild()

    # invariants

    def _check_nodes(self) -> tuple[int, int]:
        nodes = check_structure(self._tree.root, self._page_size)
        for node in nodes:
            _check_tiers(node, self._tree.root)
        on_device = [node for node in nodes if node.on_device]
        require_unique((node, node.kv_indices) for node in on_device)
        candidates = {node for node in on_device if not node.device_children and not node.lock_ref}
        require(candidates == set(self._queue), "the device queue does not hold exactly the unlocked device leaves")
        waiting = {node for node in nodes if not node.on_device and not node.children and not node.host_locks}
        self._host.check([(node, node) for node in nodes if node.on_host], waiting)
        evictable_size = sum(len(node) for node in on_device if not node.lock_ref)
        return evictable_size, sum(map(len, on_device)) - evictable_size


def _check_tiers(node: Node, root: Node) -> None:
    require(node.on_device or node.on_host, "a node lies in no tier")
    parent = node.parent or root
    require(parent is root or not node.on_device or parent.on_device, "a node hangs on the device alone")
    require(node.device_children == sum(child.on_device for child in node.children.values()), "device children differ")
    require(node.on_device or not node.lock_ref, "a node on the host only is locked")
    if node.on_device:
        require(len(node.kv_indices) == len(node), "a node has not one device slot per token")
        require_owned(node.kv_indices)


def _not_loaded() -> CorruptCacheError:
    return CorruptCacheError("the prefix lies on the host only: load it back first")
