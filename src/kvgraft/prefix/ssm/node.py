"""Node of a tree with states: full-attention slots as in any radix tree, and perhaps the state at the node's end."""

from __future__ import annotations

from kvgraft.prefix.component.node import Component, ComponentLock, ComponentNode


class State(Component):
    """What the state-space layers hold after the last token of one node.

    Has the facts that eviction policies look at (`EvictionFacts`), of the state and not of the node: a node is used by
    all that runs through it, a state by requests that go on from it.

    Attributes:
        slot: Its slot in the owner's pool.
        created: Time at which it was recorded.
        hit_count: Requests that recorded it or locked it to go on from it.
        priority: Largest priority of a request that recorded it.
        reach: Length of the longest sequence that was inserted through it when it was recorded.
    """

    __slots__ = ("created", "hit_count", "priority", "reach", "slot")

    node: StateNode
    """At whose end it is."""

    def __init__(self, node: StateNode, slot: int, now: int, priority: int, reach: int) -> None:
        super().__init__(now)
        self.node = node
        self.slot = slot
        self.created = now
        self.hit_count = 1
        self.priority = priority
        self.reach = reach

    def __len__(self) -> int:
        return 1

    @property
    def start(self) -> int:
        """Tokens before the node."""
        return self.node.start


class StateNode(ComponentNode[State]):
    """A node with an optional state.

    A state has read all tokens before it, so it cannot be cut: after a split it stays with the lower part.
    """

    __slots__ = ()


class StateLock(ComponentLock):
    """Receipt of a lock on a tree with states.

    Attributes:
        state_locked: Whether the state at its end is held, too.
    """

    __slots__ = ("state_locked",)

    def __init__(self, node: StateNode, *, state_locked: bool) -> None:
        super().__init__(node)
        self.state_locked = state_locked
