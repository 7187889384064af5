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

from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.component.parts import TreeComponents
from kvgraft.prefix.hierarchical.copies import HostCopies
from kvgraft.prefix.hierarchical.load_back import BaseLoadBackCache
from kvgraft.prefix.radix.invariants import require
from kvgraft.prefix.results import StoredLength
from kvgraft.prefix.ssm.cache import StateRadixCache
from kvgraft.prefix.ssm.state import State, StateMatchResult, state_order

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Unpack

    from kvgraft.prefix.component.node import ComponentNode
    from kvgraft.prefix.eviction.policies import EvictionPolicy
    from kvgraft.prefix.hierarchical.transfer import LoadBack, TierTransfer
    from kvgraft.prefix.radix.base import TreeOptions
    from kvgraft.prefix.results import MatchResult, PrefixHandle, SlotArray
    from kvgraft.prefix.ssm.state import StateLock
    from kvgraft.token_key import RadixKey

    StateNode = ComponentNode[State]


class TieredStateMatchResult(StateMatchResult):
    """A match that ends at the deepest state on the device, and goes on to the deepest one of either tier after a load-back.

    Attributes:
        host_hit_len: Tokens from the one to the other. Some or all of them may lie on the device: what is missing there is
            on the host, and so is the state.
    """

    __slots__ = ("_host_handle", "host_hit_len")

    def __init__(self, path: list[StateNode], device: StateNode, host: StateNode, branching_len: int) -> None:
        super().__init__(path, device, branching_len)
        self._host_handle = host
        self.host_hit_len = host.end - device.end

    @property
    def host_handle(self) -> PrefixHandle:
        """The prefix with the deepest state of either tier."""
        return self._host_handle


class TieredStates(TreeComponents[State]):
    """The states of a tree in two tiers: what leaves the device waits on the host, if it has a copy there."""

    def __init__(self, transfer: TierTransfer, policy: EvictionPolicy) -> None:
        order = state_order(policy)
        super().__init__(order)
        self.copies = HostCopies(transfer, order)

    def requeue(self, component: State) -> None:
        """See `TreeComponents.requeue`, in the tier where it waits."""
        if component.queue_index >= 0:
            (self._queue if component.on_device else self.copies.queue).update(component)

    def free(self, component: State) -> State:
        """See `TreeComponents.free`; a copy on the host lives on."""
        super().free(component)
        self.copies.wait(component)
        return component

    def restore(self, state: State, slot: int) -> None:
        """Give a state that lies on the host only a slot on the device again."""
        self.copies.withdraw(state)
        state.slot = slot
        self.attach(state.node, state)


class HierarchicalStateCache(BaseLoadBackCache, StateRadixCache):
    """A `StateRadixCache` with evicted tokens and states that live on in host memory. Not thread-safe.

    Invariants (verified by `check`): those of `StateRadixCache` on the device, of `BaseTieredCache`, and
        - A node has one state at most: where both tiers have it, it is the same.
        - The host queue of states holds those on the host only that no load-back reads; `host_state_size` counts copies.
        - What waits in the host queue of nodes has a state there.
    """

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
        self._components = TieredStates(state_transfer, self.policy)
        self._host_states = self._components.copies

    @property
    def state_transfer(self) -> TierTransfer:
        """Mover of states between the tiers."""
        return self._components.copies.transfer

    @property
    def host_state_size(self) -> int:
        """States that have a copy on the host."""
        return self._components.copies.size

    # lookup and insert

    def _match_prefix_exact(self, key: RadixKey) -> TieredStateMatchResult:
        """Match to the deepest state of either tier; marks two states, to go on from the one if a load-back fails."""
        root = self._tree.root
        path, stop = ([], 0) if self._disabled else self._descend(key)
        if not path:
            return TieredStateMatchResult([], root, root, 0)
        now = self._tree.tick()
        self._cut_path(path, self._reachable_len(path, stop))
        self._mark_path(path, now)
        on_device = path.copy()
        self._cut_path(on_device, self._usable_len(path, stop))
        device, last = (part[-1] if part else root for part in (on_device, path))
        for state in {device.component, last.component or last.host_component}:
            if state is not None:
                state.last_access = now
                self._components.requeue(state)
        return TieredStateMatchResult(on_device, device, last, stop - stop % self._alignment)

    def _reachable_len(self, path: list[StateNode], stop: int) -> int:
        """As `_usable_len`, after a load-back."""
        for node in reversed(path):
            if (node.component is not None or node.host_component is not None) and node.end <= stop:
                return node.end
        return 0

    def _stored_in(self, path: list[StateNode], stop: int) -> StoredLength:
        on_device = self._usable_len(path, stop)
        return StoredLength(on_device, self._reachable_len(path, stop) - on_device)

    def _record(self, last: StateNode, states: Mapping[int, int], priority: int) -> dict[int, int]:
        returned = super()._record(last, states, priority)
        if states:
            self._write_through(last)
            self._write_states_through(last, min(states))
        return returned

    def _give_state(self, node: StateNode, slot: int, priority: int, reach: int) -> None:
        """Give a node without a state on the device one; a copy on the host stays one of it."""
        state = node.host_component
        if state is None:
            super()._give_state(node, slot, priority, reach)
        else:
            self._components.restore(state, slot)
            state.record_again(self._tree.now, priority, reach)
            self._components.requeue(state)
        self._queue_if_candidate(node)  # without a state it was none when it came back to the device

    def _divide(self, node: StateNode, length: int) -> StateNode:
        upper = super()._divide(node, length)
        if node.host_component is not None:
            self._components.requeue(node.host_component)  # a policy may look at where its node begins
        return upper

    def _queue_if_candidate(self, node: StateNode) -> None:
        """Queue an unlocked leaf of its tier that has a state there; without one it goes with what kept it."""
        if (node.component if node.on_device else node.host_component) is not None:
            super()._queue_if_candidate(node)

    # copies on the host

    def _write_states_through(self, last: StateNode, start: int) -> None:
        """Copy the states from position `start` on that were recorded often enough, where that is the policy."""
        least = self._backup_after
        if least is None:
            return
        step: StateNode | None = last
        while step is not None and step.end >= start:
            if step.component is not None and step.component.hit_count >= least:
                self._backup_state(step.component)
            step = step.parent

    def _evict_component(self) -> tuple[list[SlotArray], list[State]]:
        state = self._components.oldest()
        if state.node.lock_ref or not self._is_leaf(state.node):
            self._backup_state(state)
        return super()._evict_component()

    # load-backs

    def begin_load_back(self, match: MatchResult) -> LoadBack:
        """See `BaseLoadBackCache.begin_load_back`.

        Raises:
            CorruptCacheError: The match is stale.
        """
        last, begin = self._tree.resolve(match.host_handle), self._tree.resolve(match.handle)
        if not (begin.component or begin.parent is None):
            raise CorruptCacheError("the state on the device of this match is gone: match again")
        if not (last.component or last.host_component or last.parent is None):
            raise CorruptCacheError("the state on the host of this match is gone: match again")
        return super().begin_load_back(match)

    def _lock_anchor(self, anchor: StateNode, last: StateNode) -> StateLock:
        lock = self.lock_inserted(anchor)
        if anchor is not last:
            self._give_components_back(lock)  # what is loaded ends at another state
        return lock

    def _revive_state(self, state: State, slot: int) -> None:
        self._components.restore(state, slot)

    # invariants

    def _check_kind(self, components: Sequence[State]) -> None:
        super()._check_kind(components)
        require(all(node.host_component is not None for node in self._host.queue), "a leaf of the host has no state")
        copied: list[State] = []
        for node in self._tree.root.subtree():
            state: State | None = node.host_component
            if state is None:
                is_whole = node.component is None or not len(node.component.host_indices)
                require(is_whole, "a state lost its copy")
                continue
            require(state.node is node, "a copy of a state belongs to another node")
            require(node.component in (None, state), "a node has another state on the host than on the device")
            copied.append(state)
        waiting = {state for state in copied if not state.on_device and not state.host_locks}
        self._components.copies.check([(state.node, state) for state in copied], waiting)
