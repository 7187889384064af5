"""The states of a tree, the receipts of its locks, and what its lookups and inserts return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.prefix.component.node import Component, ComponentLock, ComponentNode
from kvgraft.prefix.results import NO_SLOTS, InsertResult, MatchResult, SlotArray

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.prefix.eviction.policies import EvictionKey, EvictionPolicy


class State(Component):
    """What the state-space layers hold after the last token of one node, on the device, on the host, or on both.

    It has read all tokens before it, so it cannot be cut: after a split it stays with the lower part. Has the facts that
    eviction policies look at (`EvictionFacts`), of the state and not of the node: a node is used by all that runs through
    it, a state by requests that go on from it.

    Attributes:
        slot: Its slot in the owner's pool; good only while it lies on the device.
        created: Time at which it was recorded.
        hit_count: Requests that recorded it or locked it to go on from it.
        priority: Largest priority of a request that recorded it.
        reach: Length of the longest sequence that was inserted through it when it was recorded.
        host_indices: Host slot of its copy; empty without one.
        host_locks: Load-backs that read the copy.
    """

    __slots__ = ("created", "hit_count", "host_indices", "host_locks", "priority", "reach", "slot")

    def __init__(self, node: ComponentNode[State], slot: int, now: int, priority: int, reach: int) -> None:
        super().__init__(node, now)
        self.slot = slot
        self.created = now
        self.hit_count = 1
        self.priority = priority
        self.reach = reach
        self.host_indices: SlotArray = NO_SLOTS
        self.host_locks = 0

    def __len__(self) -> int:
        return 1

    @property
    def start(self) -> int:
        """Tokens before the node."""
        return self.node.start

    @property
    def on_device(self) -> bool:
        """Whether it lies on the device."""
        return self.node.component is self

    @property
    def kv_indices(self) -> SlotArray:
        """Its slot on the device, int64 (1,)."""
        return np.array([self.slot], dtype=np.int64)

    def record_again(self, now: int, priority: int, reach: int) -> None:
        """Take in that a request computed it, too."""
        self.last_access = now
        self.hit_count += 1
        self.priority = max(self.priority, priority)
        self.reach = max(self.reach, reach)


def state_order(policy: EvictionPolicy) -> Callable[[State], EvictionKey]:
    """Key of the policy; of states that are alike to it, the one nearest to the root leaves first.

    An insert may record several: the deepest of them saves most, and what follows it can do without the others.
    """
    return lambda state: (policy(state), state.node.end)  # type: ignore[return-value]


class StateLock(ComponentLock):
    """Receipt of a lock on a tree with states."""

    __slots__ = ()

    @property
    def state_locked(self) -> bool:
        """Whether the state at its end is held, too."""
        return not self.gave_back and self.start < self.node.end


class StateMatchResult(MatchResult):
    """A match that ends at a recorded state.

    Attributes:
        state: Slot of the state after `prefix_len` tokens; None where nothing matched. It is the cache's and shared: to be
            read only, and only while a lock on `handle` holds it. A request copies it before its first forward pass.
        branching_len: How far the tokens alone reach, in whole pages and chunks; at least `prefix_len`. If it is more, the
            prompt shares tokens with another one beyond the last state: a state recorded there serves both, and others.
    """

    __slots__ = ("branching_len", "state")

    def __init__(self, path: list[ComponentNode[State]], handle: ComponentNode[State], branching_len: int) -> None:
        super().__init__([node.kv_indices for node in path], handle.end, handle)
        self.state = None if handle.component is None else handle.component.slot
        self.branching_len = branching_len


@dataclass(frozen=True, slots=True, eq=False)
class StateInsertResult(InsertResult):
    """The offered slots and states that the cache took; the handle ends at a state, or is where the insert began."""

    state_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Offered states that the cache did not take, because one is recorded there or none can be; the caller's to free."""
