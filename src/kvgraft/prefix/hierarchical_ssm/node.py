"""Node and state of a tree of two tiers with states: each lies on the device, on the host, or both."""

from __future__ import annotations

from kvgraft.prefix.hierarchical.node import TieredNode
from kvgraft.prefix.ssm.node import State, StateNode


class TieredState(State):
    """A state of one node, with the same facts for the policy in either tier.

    Attributes:
        host_slot: Slot of its copy on the host; None without one.
        host_locks: Load-backs that read the copy.
    """

    __slots__ = ("host_locks", "host_slot")

    node: TieredStateNode

    def __init__(self, node: TieredStateNode, slot: int, now: int, priority: int, reach: int) -> None:
        super().__init__(node, slot, now, priority, reach)
        self.host_slot: int | None = None
        self.host_locks = 0

    @property
    def on_device(self) -> bool:
        """Whether it lies on the device: `slot` is good then only."""
        return self.node.component is self


class TieredStateNode(TieredNode, StateNode):
    """A node of two tiers with an optional state in each.

    Attributes:
        component: The state on the device; None for a tombstone there.
        host_component: The state on the host, the same object where it lies on both; None without a copy.
    """

    __slots__ = ("device_children", "host_component", "host_indices", "host_locks", "length")

    def __init__(self, *args: object, **fields: object) -> None:
        super().__init__(*args, **fields)
        self.host_component: TieredState | None = None

    @property
    def has_state(self) -> bool:
        """Whether a request can go on from its end, after a load-back at most."""
        return self.component is not None or self.host_component is not None

    def detach(self) -> None:
        """Let a dropped node hold nothing."""
        super().detach()
        self.host_component = None
