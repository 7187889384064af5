"""Node of a tree with states: full-attention slots as in any radix tree, and perhaps the state at the node's end."""

from __future__ import annotations

from kvgraft.prefix.eviction.queue import Queueable
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.prefix.results import PrefixHandle


class State(Queueable):
    """What the state-space layers hold after the last token of one node.

    Has the facts that eviction policies look at (`EvictionFacts`), of the state and not of the node: a node is used by
    all that runs through it, a state by requests that go on from it.

    Attributes:
        node: The node at whose end it is.
        slot: Its slot in the owner's pool.
        lock_ref: Receipts that hold it.
        last_access: Time at which it was recorded, or matched last.
        created: Time at which it was recorded.
        hit_count: Requests that recorded it or locked it to go on from it.
        priority: Largest priority of a request that recorded it.
        reach: Length of the longest sequence that was inserted through it when it was recorded.
    """

    __slots__ = ("created", "hit_count", "last_access", "lock_ref", "node", "priority", "reach", "slot")

    def __init__(self, node: StateNode, slot: int, now: int, priority: int, reach: int) -> None:
        super().__init__()
        self.node = node
        self.slot = slot
        self.lock_ref = 0
        self.last_access = self.created = now
        self.hit_count = 1
        self.priority = priority
        self.reach = reach

    @property
    def start(self) -> int:
        """Tokens before the node."""
        return self.node.start


class StateNode(RadixNode):
    """A node with an optional state.

    Attributes:
        state: None for a tombstone: the slots of its tokens are there, and no request can go on from its end.
    """

    __slots__ = ("state",)

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)  # type: ignore[arg-type]
        # A state has read all tokens before it, so it cannot be cut: after a split it stays with the lower part.
        self.state: State | None = None

    def detach(self) -> None:
        """Let a dropped node hold nothing; also breaks the cycle between node and state."""
        super().detach()
        self.state = None


class StateLock(PrefixHandle):
    """Receipt of a lock on a tree with states.

    Attributes:
        node: The locked prefix.
        state_locked: Whether the state at its end is held, too.
        released: Whether the lock was given back.
    """

    __slots__ = ("node", "released", "state_locked")

    def __init__(self, node: StateNode, *, state_locked: bool) -> None:
        self.node = node
        self.state_locked = state_locked
        self.released = False
