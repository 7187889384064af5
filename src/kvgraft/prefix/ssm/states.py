"""The states of a tree: how many there are, which of them can leave, and in which order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.eviction.queue import EvictionQueue
from kvgraft.prefix.ssm.invariants import check_states
from kvgraft.prefix.ssm.node import State

if TYPE_CHECKING:
    from kvgraft.prefix.eviction.policies import EvictionKey, EvictionPolicy
    from kvgraft.prefix.ssm.node import StateNode


class TreeStates:
    """Records, locks, refreshes and frees the states of one tree; knows no tokens.

    Invariants (verified by `check`):
        - The queue holds the states that no receipt holds and nothing else.
        - `evictable_size` and `protected_size` count states that no receipt holds and that one does.

    Attributes:
        evictable_size: States that no lock holds.
        protected_size: States under at least one lock.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self.evictable_size = 0
        self.protected_size = 0
        self._policy = policy
        self._queue: EvictionQueue[State] = EvictionQueue(self._order)

    def __len__(self) -> int:
        """States that can leave."""
        return len(self._queue)

    def _order(self, state: State) -> EvictionKey:
        """Key of the policy; of states that are alike to it, the one nearest to the root leaves first.

        An insert may record several: the deepest of them saves most, and what follows it can do without the others.
        """
        return (self._policy(state), state.node.end)  # type: ignore[return-value]

    def oldest(self) -> State:
        """The state that leaves next; there is one."""
        return self._queue.first()

    def record(self, node: StateNode, slot: int, now: int, priority: int, reach: int) -> None:
        """Give a tombstone a state, used now and not locked."""
        node.state = State(node, slot, now, priority, reach)
        self.evictable_size += 1
        self._queue.add(node.state)

    def record_again(self, state: State, now: int, priority: int, reach: int) -> None:
        """Take in that a request computed a state that is recorded."""
        state.last_access = now
        state.hit_count += 1
        state.priority = max(state.priority, priority)
        state.reach = max(state.reach, reach)
        self.requeue(state)

    def touch(self, state: State, now: int) -> None:
        """Mark a state as used now.

        Those above it stay as old as they are: a request that goes on from this one does not need them.
        """
        state.last_access = now
        self.requeue(state)

    def requeue(self, state: State) -> None:
        """Restore the order of eviction after a fact about a state changed."""
        if state.queue_index >= 0:
            self._queue.update(state)

    def lock(self, state: State) -> None:
        """Hold a state for one receipt more."""
        state.lock_ref += 1
        if state.lock_ref == 1:
            self.evictable_size -= 1
            self.protected_size += 1
            self._queue.remove(state)

    def unlock(self, state: State) -> None:
        """Give back a receipt."""
        state.lock_ref -= 1
        if not state.lock_ref:
            self.evictable_size += 1
            self.protected_size -= 1
            self._queue.add(state)

    def free(self, state: State) -> int:
        """Take an unlocked state from its node, which becomes a tombstone; returns the slot."""
        self._queue.remove(state)
        self.evictable_size -= 1
        state.node.state = None
        return state.slot

    def clear(self) -> None:
        """Forget all states, locked or not, of nodes that the tree has dropped."""
        self._queue.clear()
        self.evictable_size = self.protected_size = 0

    def check(self, root: StateNode, alignment: int, *, unique_slots: bool) -> None:
        """Verify every invariant of the states below `root`; raises `CorruptCacheError`."""
        self._queue.check()
        sizes = check_states(root, alignment, set(self._queue), unique_slots=unique_slots)
        counted = (self.evictable_size, self.protected_size)
        if sizes != counted:
            raise CorruptCacheError(f"evictable and protected states are {sizes}, counted as {counted}")
