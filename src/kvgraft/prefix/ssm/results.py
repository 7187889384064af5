"""Results of a cache with states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.prefix.results import NO_SLOTS, InsertResult, MatchResult, SlotArray

if TYPE_CHECKING:
    from kvgraft.prefix.ssm.node import StateNode


class StateMatchResult(MatchResult):
    """A match that ends at a recorded state.

    Attributes:
        state: Slot of the state after `prefix_len` tokens; None where nothing matched. It is the cache's and shared: to be
            read only, and only while a lock on `handle` holds it. A request copies it before its first forward pass.
        branching_len: How far the tokens alone reach, in whole pages and chunks; at least `prefix_len`. If it is more, the
            prompt shares tokens with another one beyond the last state: a state recorded there serves both, and others.
    """

    __slots__ = ("branching_len", "state")

    def __init__(self, path: list[StateNode], handle: StateNode, branching_len: int) -> None:
        super().__init__([node.kv_indices for node in path], handle.end, handle)
        self.state = None if handle.component is None else handle.component.slot
        self.branching_len = branching_len


@dataclass(frozen=True, slots=True, eq=False)
class StateInsertResult(InsertResult):
    """The offered slots and states that the cache took; the handle ends at a state, or is where the insert began."""

    state_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Offered states that the cache did not take, because one is recorded there or none can be; the caller's to free."""
