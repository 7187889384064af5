"""The states of a tree in two tiers: which lie where, which of them can leave, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.hierarchical_ssm.node import TieredState, TieredStateNode
from kvgraft.prefix.radix.invariants import require
from kvgraft.prefix.ssm.states import TreeStates

if TYPE_CHECKING:
    from kvgraft.prefix.component.node import ComponentNode
    from kvgraft.prefix.eviction.policies import EvictionPolicy
    from kvgraft.prefix.ssm.node import State, StateNode


class TieredStates(TreeStates):
    """Keeps account of states in both tiers; sizes and order of the device are those of `TreeStates`. Copies nothing.

    Invariants (verified by `check`), besides those of `TreeComponents`:
        - A node has one state at most: where both tiers have it, it is the same.
        - The host queue holds the states that lie on the host only and that no load-back reads; `host_size` counts copies.

    Attributes:
        host_size: States that have a copy on the host.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        super().__init__(policy)
        self.host_size = 0
        self._host_queue: EvictionQueue[TieredState] = EvictionQueue(self._order)

    def oldest_copy(self) -> TieredState | None:
        """The state that leaves the host next; None if none can."""
        return self._host_queue.first() if self._host_queue else None

    def record(self, node: StateNode, slot: int, now: int, priority: int, reach: int) -> None:
        """Give a node without a state on the device one, used now and not locked; a copy on the host stays one of it."""
        assert isinstance(node, TieredStateNode), "the tree makes no other nodes"
        state = node.host_component
        if state is None:
            self._attach(node, TieredState(node, slot, now, priority, reach))
            return
        self.restore(state, slot)
        self.record_again(state, now, priority, reach)

    def restore(self, state: TieredState, slot: int) -> None:
        """Give a state that lies on the host only a slot on the device again."""
        if state.queue_index >= 0:
            self._host_queue.remove(state)
        state.slot = slot
        self._attach(state.node, state)

    def free(self, component: State) -> State:
        """See `TreeComponents.free`; a copy on the host lives on."""
        super().free(component)
        assert isinstance(component, TieredState), "the tree has no other states"
        self._queue_copy(component)
        return component

    def requeue(self, component: State) -> None:
        """See `TreeComponents.requeue`, in the tier where it waits."""
        assert isinstance(component, TieredState), "the tree has no other states"
        if component.queue_index >= 0:
            (self._queue if component.on_device else self._host_queue).update(component)

    def add_copy(self, state: TieredState, host_slot: int) -> None:
        """Note that a state on the device has a copy on the host."""
        state.host_slot = host_slot
        state.node.host_component = state
        self.host_size += 1

    def drop_copy(self, state: TieredState) -> int:
        """Forget the copy of a state; returns its host slot, for the caller to free."""
        assert state.host_slot is not None, "only a state with a copy has one to lose"
        if state.queue_index >= 0 and not state.on_device:
            self._host_queue.remove(state)
        host_slot, state.host_slot = state.host_slot, None
        state.node.host_component = None
        self.host_size -= 1
        return host_slot

    def pin_copy(self, state: TieredState) -> None:
        """Keep a copy while a load-back reads it."""
        state.host_locks += 1
        if state.queue_index >= 0 and not state.on_device:
            self._host_queue.remove(state)

    def unpin_copy(self, state: TieredState) -> None:
        """Give back a pin."""
        state.host_locks -= 1
        self._queue_copy(state)

    def clear(self) -> None:
        """Forget all states of both tiers."""
        super().clear()
        self._host_queue.clear()
        self.host_size = 0

    def rebuild(self) -> None:
        """Forget all states of both tiers without looking at them."""
        super().rebuild()
        self._host_queue.rebuild()
        self.host_size = 0

    def check(self, root: ComponentNode[State]) -> None:
        """Verify every invariant of the states below `root`; raises `CorruptCacheError`."""
        super().check(root)
        self._host_queue.check()
        assert isinstance(root, TieredStateNode), "the tree makes no other nodes"
        copies: list[TieredState] = []
        for node in root.subtree():
            state = node.host_component
            if state is None:
                require(node.component is None or _host_slot(node.component) is None, "a state lost its copy")
                continue
            require(state.node is node and state.host_slot is not None, "a copy of a state belongs to another node")
            require(node.component in (None, state), "a node has another state on the host than on the device")
            require(state.host_locks >= 0, "host_locks of a state is negative")
            copies.append(state)
        require(len({state.host_slot for state in copies}) == len(copies), "a host slot of a state is held twice")
        waiting = {state for state in copies if not state.on_device and not state.host_locks}
        require(waiting == set(self._host_queue), "the host queue does not hold exactly the unread states")
        require(len(copies) == self.host_size, f"{len(copies)} states have copies, counted as {self.host_size}")

    def _queue_copy(self, state: TieredState) -> None:
        if state.host_slot is not None and not state.on_device and not state.host_locks and state.queue_index < 0:
            self._host_queue.add(state)


def _host_slot(state: State) -> int | None:
    return state.host_slot if isinstance(state, TieredState) else None
