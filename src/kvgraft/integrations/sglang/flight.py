"""One request on its way through prefill: what is to be loaded, what was, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.reuse.lineage import computed_runs
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from kvgraft.integrations.sglang.ranks import Span
    from kvgraft.integrations.sglang.reports import Attempt
    from kvgraft.reuse.lineage import ComputedRun
    from kvgraft.types import Miss, Namespace


@dataclass(frozen=True, slots=True, eq=False)
class LoadedSpan:
    """A span whose K/V were copied; `tier` is `device` or `host`."""

    span: Span
    tier: str


@dataclass(slots=True, eq=False)
class Flight:
    """State of a request from its first match to its release; a retracted request starts a new one.

    Attributes:
        rid: SGLang's name of the request; clients choose it.
        namespace: Whose donors it may use and who may use its text.
        attempts: What became of it before each retraction so far.
        num_tokens: Length of the prompt, with output that was generated before a retraction.
        exact_len: Tokens that the exact prefix gave when it was matched last.
        end: Positions from it on are computed.
        version: Of the donor library when the plan was made; -1 for never.
        spans: Still to be loaded, ascending.
        loaded: Copied so far, ascending.
        private: Slots that were loaded before the request had a row.
        registered_len: Tokens from the start that are donors already.
        adopted: Ranges of the row that the tree took over under names of our own.
        miss: Why nothing was planned or loaded.
        num_steps: Prefill steps that the plan's gaps were cut into, the first one included.
    """

    rid: str
    namespace: Namespace
    attempts: tuple[Attempt, ...] = ()
    num_tokens: int = 0
    exact_len: int = 0
    end: int = 0
    version: int = -1
    spans: list[Span] = field(default_factory=list)
    loaded: list[LoadedSpan] = field(default_factory=list)
    private: list[Tensor] = field(default_factory=list)
    registered_len: int = 0
    adopted: list[tuple[int, int]] = field(default_factory=list)
    miss: Miss | None = None
    num_steps: int = 1
    lookup_ms: float = 0.0
    graft_ms: float = 0.0

    @property
    def loaded_len(self) -> int:
        """Tokens copied so far."""
        return sum(item.span.length for item in self.loaded)

    @property
    def is_substituted(self) -> bool:
        """Whether K/V of other tokens were copied."""
        return any(item.span.fidelity is Fidelity.SUBSTITUTED for item in self.loaded)

    def stretch(self, position: int) -> list[Span]:
        """Return the spans that follow one another from `position` on."""
        found: list[Span] = []
        for span in self.spans:
            if span.start != position:
                break
            found.append(span)
            position = span.end
        return found

    def drop(self, spans: list[Span]) -> None:
        """Forget spans that were loaded or cannot be."""
        self.spans = [span for span in self.spans if span not in spans]

    def pass_by(self, position: int, min_run: int) -> None:
        """Cut off what lies before `position`; what is left of a span must be worth its copy."""
        behind = [
            span if span.start >= position else span.behind(position) for span in self.spans if span.end > position
        ]
        self.spans = [span for span in behind if span.start > position or span.length >= min_run]

    def next_start(self, position: int) -> int | None:
        """Return where the next span behind `position` begins, or None."""
        return next((span.start for span in self.spans if span.start > position), None)

    def computed_segments(self, start: int, stop: int) -> list[ComputedRun]:
        """Return the runs in `[start, stop)` that were computed."""
        return list(computed_runs(self._copied(), start, stop))

    def _copied(self) -> Iterator[tuple[int, int, int]]:
        for item in self.loaded:
            assert item.span.donor is not None
            yield item.span.start, item.span.end, item.span.donor.generation
