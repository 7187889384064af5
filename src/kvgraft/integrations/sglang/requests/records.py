"""Records that a request is made of; `request.SGLangRequest` replaces them whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kvgraft.reuse.report import report_as_dict

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.types import GraftReport, Miss, RepairReport


class RequestPhase(Enum):
    """Progress of a request. Nothing but `SGLangRequest` changes it."""

    NEW = "new"
    """It came, or begins again; donors were not looked for."""
    READING = "reading"
    """It keeps its place in the queue: K/V of stored donors are on their way."""
    WAITING = "waiting"
    """Decided, by a lookup for its last match; SGLang has given it no row."""
    STALE = "stale"
    """As `WAITING`, by a lookup for an earlier match: donors are looked for again before anything is loaded."""
    STARTED = "started"
    """Its prompt is computed; regions may be loaded between chunks."""


DECIDED = (RequestPhase.WAITING, RequestPhase.STALE, RequestPhase.STARTED)
"""Phases in which donors were looked for since the request came, or began again, and no store is waited for."""


@dataclass(frozen=True, slots=True)
class MatchedPrompt:
    """A prompt as SGLang matched it last.

    Attributes:
        num_tokens: Its length, with output that was generated before a retraction.
        prompt_len: Length of the prompt alone, for which reuse is planned, so that no retraction changes what is chosen.
        end: Positions from it on are computed.
        at: When, in seconds of some clock.
    """

    num_tokens: int = 0
    prompt_len: int = 0
    end: int = 0
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """The end of a request's one wait for stores: why they were of no use, if they were not, and how long it took."""

    miss: Miss | None
    ms: float


@dataclass(frozen=True, slots=True)
class PassWork:
    """What passes over chosen tokens have done.

    Attributes:
        policy: That chose them; empty for none so far.
        num_corrected: Reused tokens that were corrected for drift and not computed again.
        ms: Time of the passes, beside SGLang's own.
        repair: Which tokens were drawn from it; None while nothing was computed.
    """

    policy: str = ""
    num_corrected: int = 0
    ms: float = 0.0
    repair: RepairReport | None = None


@dataclass(slots=True, eq=False)
class HeldSlots:
    """Slots of a request: those loaded before it had a row, and ranges of the row that the tree took over."""

    private: list[Tensor] = field(default_factory=list)
    adopted: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PrefillAttempt:
    """One computation of a request, as reports list it.

    Attributes:
        report: Of this computation.
        sources: By span of the report, the request that computed it and the tier from which it was copied.
        prefill_steps: Scheduler steps that its prefill took.
    """

    report: GraftReport
    sources: tuple[dict[str, object], ...]
    prefill_steps: int

    def as_dict(self) -> dict[str, object]:
        """Return it in types that JSON has."""
        return {**report_as_dict(self.report), "sources": list(self.sources), "prefill_steps": self.prefill_steps}
