"""What an engine did, as an attempt hears of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.reuse.attempt.commands import Command
    from kvgraft.reuse.outcome import GraftOutcome
    from kvgraft.types import Miss


@dataclass(frozen=True, slots=True)
class Admitted:
    """The engine gave the request places and counts `num_tokens` of its graft as computed; `tiers` are the donors' now."""

    num_tokens: int
    tiers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Copied:
    """The copy has ended, well or not."""

    outcome: GraftOutcome


@dataclass(frozen=True, slots=True)
class Ran:
    """The engine computes the positions from `start` on in the step that is being scheduled."""

    start: int


@dataclass(frozen=True, slots=True)
class Repaired:
    """The repair has ended, well or not."""

    outcome: GraftOutcome


@dataclass(frozen=True, slots=True)
class Preempted:
    """The engine takes the request's places away; `Attempt.again` follows once it is looked up."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The request is looked up anew; where that failed, `miss` says why an attempt without places is computed."""

    miss: Miss | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """All donors are forgotten: K/V may be of another model from now on. `is_lost` where the engine forgets repairs, too."""

    is_lost: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended for any reason, with `num_drawn` tokens of an answer."""

    num_drawn: int


@dataclass(frozen=True, slots=True)
class Failed:
    """An event could not be taken, or a command not be carried out, for a `reason` in one line."""

    what: Event | Command
    reason: str


Event = Admitted | Copied | Ran | Repaired | Preempted | Replaced | Reset | Finished | Failed
