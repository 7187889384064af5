"""Contract between a cache of two tiers and the owner of both pools, and the values that pass between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.prefix.results import NO_SLOTS, PrefixHandle, SlotArray

if TYPE_CHECKING:
    from kvgraft.prefix.component.node import ComponentNode

HOST_MEDIUM = "CPU_PINNED"

WRITE_POLICIES: dict[str, int | None] = {"write_back": None, "write_through": 1, "write_through_selective": 2}
"""Hits after which a node is copied to the host, its first insert included; None copies it when it leaves the device."""


class TierTransfer(Protocol):
    """Copies of the owner of both pools, of K/V or of states. On failure it keeps nothing allocated.

    Slots are int64 (n,); as many are returned as were given, in the same order, and are the caller's.
    """

    def backup(self, device_slots: SlotArray, /) -> SlotArray | None:
        """Copy device slots to new host slots and return those; None if there is no room on the host."""

    def load(self, host_slots: SlotArray, /) -> SlotArray | None:
        """Copy host slots to new device slots and return those; None if there is no room on the device."""

    def free_host(self, host_slots: SlotArray, /) -> None:
        """Take back host slots."""


@dataclass(slots=True, eq=False)
class LoadBack:
    """A load-back in progress: the host part `[start, end)` of a match, kept from eviction until commit or abort."""

    host_indices: SlotArray
    start: int
    """First position of the host part."""
    node: ComponentNode[Any]
    locks: tuple[PrefixHandle, ...]
    """Locks on the device part before it."""
    host_states: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Host slot of the state at its end; empty where there are no states, or it lies on the device."""
    done: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LoadBackResult:
    """The prefix after a load-back."""

    handle: PrefixHandle
    """The prefix that lies on the device now."""
    prefix_len: int
    freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Device slots that were not needed, because another request brought the same KV meanwhile, or that it failed."""
    state_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """The same of states."""
