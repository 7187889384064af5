"""Prefix cache of hybrid models over two tiers: slots of tokens and recorded states, on the device and copied to host memory.

On the device all is as in `StateRadixCache`: what is locked, what leaves, and in which order. What leaves is copied:

    a state inside the tree    its copy; the tokens stay on the device
    a leaf                     copies of its state and of its tokens
    a tombstone above it       copies of its tokens, where what hangs below on the host has a state

On the host, too, tokens without a state after them are dropped, in the same two orders: leaves with their states, and states
alone. A match ends at the deepest state of either tier; a load-back brings the tokens that the device lacks and that one
state, or nothing. K/V and states each have a `TierTransfer` of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.hierarchical.load_back import BaseLoadBackCache
from kvgraft.prefix.hierarchical.transfer import LoadBack, LoadBackResult, TierTransfer
from kvgraft.prefix.hierarchical_ssm.node import TieredState, TieredStateNode
from kvgraft.prefix.hierarchical_ssm.results import TieredStateMatchResult
from kvgraft.prefix.hierarchical_ssm.states import TieredStates
from kvgraft.prefix.radix.invariants import require
from kvgraft.prefix.results import NO_SLOTS, EvictResult, StoredLength, join_results
from kvgraft.prefix.ssm.cache import NO_STATES, StateRadixCache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    from kvgraft.prefix.radix.base import TreeOptions
    from kvgraft.prefix.radix.tree import RadixTree
    from kvgraft.prefix.results import MatchResult, PrefixHandle, SlotArray
    from kvgraft.prefix.ssm.node import StateLock
    from kvgraft.prefix.ssm.results import StateInsertResult
    from kvgraft.token_key import RadixKey


class HierarchicalStateCache(StateRadixCache, BaseLoadBackCache[TieredStateNode]):
    """A `StateRadixCache` with evicted tokens and states that live on in host memory. Not thread-safe.

    Invariants (verified by `check`): those of `StateRadixCache` on the device, of `BaseTieredCache` and of `TieredStates`,
    and that what waits in the host queue has a state there.
    """

    _node_class = TieredStateNode
    _states_class = TieredStates
    _tree: RadixTree[TieredStateNode]  # type: ignore[assignment]
    _components: TieredStates

    def __init__(
        self,
        page_size: int = 1,
        *,
        transfer: TierTransfer,
        state_transfer: TierTransfer,
        write_policy: str = "write_through",
        state_chunk_size: int = 1,
        **options: Unpack[TreeOptions],
    ) -> None:
        """Make an empty cache.

        Args:
            page_size: Tokens per page.
            transfer: Moves K/V between the tiers.
            state_transfer: Moves states, one at a time.
            write_policy: When copies of both are made: a name in `WRITE_POLICIES`.
            state_chunk_size: As of `StateRadixCache`.
            options: As of `BaseRadixCache`; the policy orders tokens and states in both tiers.
        """
        super().__init__(  # type: ignore[call-arg] # of the two bases
            page_size,
            state_chunk_size=state_chunk_size,
            transfer=transfer,
            write_policy=write_policy,
            **options,
        )
        self._state_transfer = state_transfer

    @property
    def state_transfer(self) -> TierTransfer:
        """Mover of states between the tiers."""
        return self._state_transfer

    @property
    def host_state_size(self) -> int:
        """States that have a copy on the host."""
        return self._components.host_size

    # lookup and insert

    def _match_prefix_exact(self, key: RadixKey) -> TieredStateMatchResult:
        root = self._tree.root
        if self._disabled:
            return TieredStateMatchResult([], root, root, 0)
        found, branching_len = self._descend(key)
        path = cast("list[TieredStateNode]", found)
        while path and not path[-1].has_state:
            path.pop()
        last = path[-1] if path else root
        device = next((node for node in reversed(path) if node.component is not None), root)
        self._mark_tiers(path, device)
        return TieredStateMatchResult([node for node in path if node.end <= device.end], device, last, branching_len)

    def _mark_tiers(self, path: Sequence[TieredStateNode], device: TieredStateNode) -> None:
        """Mark nodes as used now, and two states: the one at their end, and the one to go on from if a load-back fails."""
        now = self._tree.tick()
        for node in path:  # candidates have children here, those that lie on the host only
            node.last_access = now
            self._requeue(node)
        for state in {device.component, path[-1].component or path[-1].host_component} if path else ():
            if state is not None:
                self._components.touch(state, now)

    def _stored_in(self, path: list[TieredStateNode], stop: int) -> StoredLength:  # type: ignore[override]
        within = [node for node in path if node.end <= stop and node.has_state]
        on_device = max((node.end for node in within if node.component is not None), default=0)
        return StoredLength(on_device, max((node.end for node in within), default=0) - on_device)

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
        states: Mapping[int, int] = NO_STATES,
    ) -> StateInsertResult:
        """Store as `StateRadixCache.insert`; what lies on the host only takes device slots from the insert.

        Raises:
            ConfigError: Slots, positions or handle do not fit the key. Nothing has changed then.
            CorruptCacheError: `after` lies on the host only, was dropped, or is of another cache.
        """
        result = super().insert(key, kv_indices, after=after, priority=priority, counted_len=counted_len, states=states)
        if self._backup_after is not None and states and not self._disabled:
            last = self._tree.resolve(result.handle)
            self._write_through(last)
            self._write_states_through(last, min(states))
        return result

    def _prefix_of(self, key: RadixKey, after: PrefixHandle | None) -> TieredStateNode:
        node = super()._prefix_of(key, after)
        assert isinstance(node, TieredStateNode), "the tree makes no other nodes"
        self._require_device(node)
        return node

    def _divide(self, node: TieredStateNode, length: int) -> TieredStateNode:  # type: ignore[override]
        upper = super()._divide(node, length)
        assert isinstance(upper, TieredStateNode), "a part of a node is of its class"
        if node.host_component is not None:
            self._components.requeue(node.host_component)  # a policy may look at where its node begins
        return upper

    def _is_leaf(self, node: TieredStateNode) -> bool:  # type: ignore[override]
        """Return whether nothing on the device continues a node that lies there."""
        return not node.device_children

    def _queue_if_candidate(self, node: TieredStateNode) -> None:  # type: ignore[override]
        """Queue an unlocked leaf of its tier that has a state there; without one it goes with what kept it."""
        if node.queue_index >= 0 or node.parent is None:
            return
        if node.on_device:
            if node.component is not None and not node.device_children and not node.lock_ref:
                self._queue.add(node)
        elif node.host_component is not None and not node.children and not node.host_locks:
            self._host_queue.add(node)

    # copies on the host

    def _write_states_through(self, last: TieredStateNode, start: int) -> None:
        """Copy the states from position `start` on that were recorded often enough and have no copy yet."""
        assert self._backup_after is not None
        step: TieredStateNode | None = last
        while step is not None and step.end >= start:
            state = step.component
            if isinstance(state, TieredState) and state.hit_count >= self._backup_after:
                self._backup_state(state)
            step = step.parent

    def _backup_state(self, state: TieredState) -> None:
        """Copy a state that lies on the device to the host unless it has a copy, making room there once."""
        if state.host_slot is not None:
            return
        host_slots = self._try_backup_state(state)
        if host_slots is None and self._evict_host_state():
            host_slots = self._try_backup_state(state)
        if host_slots is None:
            return
        if len(host_slots) != 1:
            raise ConfigError(f"backup returned {len(host_slots)} host slots for a state; one or None")
        self._components.add_copy(state, int(host_slots[0]))

    def _try_backup_state(self, state: TieredState) -> SlotArray | None:
        told = f"backup of the state after {state.node.end} tokens failed; it stays without a copy"
        return self._transferred(self._state_transfer.backup, _slot(state.slot), told)

    def _evict_host_state(self) -> bool:
        """Drop the state that leaves the host next, with its node if that is a leaf there; False if none can."""
        state = self._components.oldest_copy()
        if state is None:
            return False
        node = state.node
        if node.queue_index >= 0 and not node.on_device:
            self._host_queue.remove(node)
            self._drop_host_leaf(node)
        else:
            self._free_state_copy(state)
        return True

    def _drop_host_leaf(self, node: TieredStateNode) -> int:
        """Take out a leaf of the host, and the tombstones above that become leaves thereby; returns how many tokens left."""
        num_tokens = 0
        while True:
            parent = node.parent
            num_tokens += super()._drop_host_leaf(node)
            if parent is None or parent.parent is None or parent.on_device or not _is_useless(parent):
                return num_tokens
            node = parent

    def _free_copy(self, node: TieredStateNode) -> None:
        super()._free_copy(node)
        if node.host_component is not None:
            self._free_state_copy(node.host_component)

    def _free_state_copy(self, state: TieredState) -> None:
        self._state_transfer.free_host(_slot(self._components.drop_copy(state)))

    # eviction

    def _drop(self, leaf: TieredStateNode) -> tuple[list[SlotArray], list[TieredState]]:  # type: ignore[override]
        """Take an unlocked, unqueued leaf off the device, and the tombstones above that become unlocked leaves thereby."""
        slots: list[SlotArray] = []
        states: list[TieredState] = []
        node = leaf
        while True:
            state = node.component
            slots.append(node.kv_indices)
            self._evictable_size -= len(node)
            parent = self._take_off_device(node)
            if isinstance(state, TieredState):
                self._components.free(state)
                states.append(state)
            if parent.lock_ref or parent.device_children:
                return slots, states
            if parent.component is not None:
                self._queue_if_candidate(parent)
                return slots, states
            node = parent

    def _keeps_copy(self, node: TieredStateNode) -> bool:
        """Return whether a node that leaves the device is of use on the host, with copies of its tokens and its state."""
        if isinstance(node.component, TieredState):
            self._backup_state(node.component)
        if _is_useless(node) or not (node.on_host or self._backup(node)):
            return False
        return not _is_useless(node)  # making room may have dropped what hung below

    def _evict_component(self) -> tuple[list[SlotArray], list[TieredState]]:  # type: ignore[override]
        state = self._components.oldest()
        if isinstance(state, TieredState) and (state.node.lock_ref or not self._is_leaf(state.node)):
            self._backup_state(state)
        return super()._evict_component()  # type: ignore[return-value]

    def reset_both(self) -> EvictResult:
        """Forget everything of both tiers; host slots are freed through the transfers, device slots are returned."""
        copies = [node.host_component for node in self._tree.root.subtree() if node.host_component is not None]
        freed = super().reset_both()
        if copies:
            self._state_transfer.free_host(np.array([state.host_slot for state in copies], dtype=np.int64))
        return freed

    # load-backs

    def inc_lock_ref(self, handle: PrefixHandle) -> StateLock:
        """Keep a prefix on the device from eviction, and the state at its end; returns the receipt.

        Raises:
            CorruptCacheError: The handle is stale, or its prefix or its state lies on the host only.
        """
        node = self._tree.resolve(handle)
        if node.component is None and node.host_component is not None:
            raise CorruptCacheError("the prefix lies on the host only: load it back first")
        return super().inc_lock_ref(handle)

    def load_back(self, match: MatchResult) -> LoadBackResult:
        """Bring the host part of a match and its state to the device; if either fails the device part is all there is.

        The caller makes room on the device beforehand or inside `TierTransfer.load`.
        """
        ticket = self.begin_load_back(match)
        states = self._loaded(self._state_transfer, ticket.host_states)
        slots = None if states is None else self._loaded(self._transfer, ticket.host_indices)
        if states is None or slots is None:
            loaded = EvictResult(NO_SLOTS, state_freed=NO_SLOTS if states is None else states)
            result = join_results(loaded, self.abort_load_back(ticket))
            return LoadBackResult(match.handle, match.prefix_len, result.freed, result.state_freed)
        return self.commit_load_back(ticket, slots, states)

    def begin_load_back(self, match: MatchResult) -> LoadBack:
        """Keep both parts of a match from eviction while the owner copies what the ticket names to the device.

        Raises:
            CorruptCacheError: The match is stale.
        """
        last, begin = self._tree.resolve(match.host_handle), self._tree.resolve(match.handle)
        if not (begin.component or begin.parent is None) or not (last.has_state or last.parent is None):
            raise CorruptCacheError("a state of this match is gone: match again")
        anchor = last
        while anchor.parent is not None and not anchor.on_device:
            anchor = anchor.parent
        lock = self._lock(anchor)
        if lock.state_locked and anchor is not last:
            self.dec_state_lock_only(lock)  # what is loaded ends at another one
        host_states = NO_SLOTS
        if last.component is None and last.host_component is not None:
            self._components.pin_copy(last.host_component)
            host_states = _slot(last.host_component.host_slot)
        host_indices = self._pin(self._host_part(last, anchor.end))
        return LoadBack(host_indices, anchor.end, last, (self._lock(begin), lock), host_states)

    def _restore_state(self, ticket: LoadBack, states: SlotArray) -> SlotArray:
        node = ticket.node
        assert isinstance(node, TieredStateNode), "the tree makes no other nodes"
        if not len(states) or node.component is not None:
            return states
        assert node.host_component is not None, "a load-back pins the copy"
        self._components.restore(node.host_component, int(states[0]))
        return NO_SLOTS

    def _close(self, ticket: LoadBack, nodes: Sequence[TieredStateNode]) -> EvictResult:
        state = ticket.node.host_component if isinstance(ticket.node, TieredStateNode) else None
        if len(ticket.host_states) and state is not None:
            self._components.unpin_copy(state)
        return super()._close(ticket, nodes)

    # invariants

    def _check_kind(self) -> None:
        super()._check_kind()
        require(all(node.host_component is not None for node in self._host_queue), "a leaf of the host has no state")


def _is_useless(node: TieredStateNode) -> bool:
    """Return whether the host has no state at the end of a node nor below."""
    return node.host_component is None and not node.children


def _slot(slot: int | None) -> SlotArray:
    return np.array([slot], dtype=np.int64)
