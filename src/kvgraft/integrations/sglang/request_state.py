"""One request on its way through prefill: what is to be loaded, what was, and what its K/V are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.integrations.sglang.reporting.attempt import Attempt
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.report import request_report
from kvgraft.types import Fidelity, GraftPlan, Match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.integrations.sglang.planning.spans import Span
    from kvgraft.integrations.sglang.stored.reads import SpanReads
    from kvgraft.types import Miss, Namespace, SpanReport, Substitution


@dataclass(slots=True, eq=False)
class RequestState:
    """State of a request from its first match to its release. A retracted one begins anew, but for its `attempts`.

    Attributes:
        rid: SGLang's name of the request; clients choose it.
        namespace: Whose donors it may use and who may use its text.
        attempts: What became of it before each retraction so far.
        lineage: Where its K/V come from, from the last match on.
        num_tokens: Length of the prompt, with output that was generated before a retraction.
        planned_for: What the plan depends on: version of the donors, length of the prompt, end, exact length.
        spans: Still to be loaded, ascending.
        reads: Of stored donors, under way; the request waits for them.
        has_read: Whether it has waited for stores, which it does once.
        read_miss: Why what it has waited for did not come, or None.
        read_ms: How long it has waited.
        matched_at: When it was last matched, in seconds of some clock.
        is_timed: Whether its prefill has told how long prefills take.
        sources: By span of the lineage, who computed it and from which tier it was copied.
        private: Slots that were loaded before the request had a row.
        registered_len: Tokens from the start that are donors already.
        adopted: Ranges of the row that the tree took over under names of our own.
        miss: Why nothing was planned or loaded.
        substitution: What was planned last to stand in, or None.
        policy: What chose tokens to compute again; empty if nothing did.
        num_taken: Spans of the lineage of which the policy has had its choice.
        num_corrected: Reused tokens that were corrected for drift and not computed again.
        num_steps: Prefill steps that the plan's gaps were cut into, the first one included.
        lookup_ms: Time of the last lookup.
        graft_ms: Time of all copies.
        recompute_ms: Time of passes over chosen tokens, beside SGLang's own.
    """

    rid: str
    namespace: Namespace
    attempts: tuple[Attempt, ...] = ()
    lineage: Lineage = field(default_factory=lambda: Lineage(0))
    num_tokens: int = 0
    planned_for: tuple[int, int, int, int] | None = None
    spans: list[Span] = field(default_factory=list)
    reads: SpanReads | None = None
    has_read: bool = False
    read_miss: Miss | None = None
    read_ms: float = 0.0
    matched_at: float = 0.0
    is_timed: bool = False
    sources: list[dict[str, object]] = field(default_factory=list)
    private: list[Tensor] = field(default_factory=list)
    registered_len: int = 0
    adopted: list[tuple[int, int]] = field(default_factory=list)
    miss: Miss | None = None
    substitution: Substitution | None = None
    policy: str = ""
    num_taken: int = 0
    num_corrected: int = 0
    num_steps: int = 1
    lookup_ms: float = 0.0
    graft_ms: float = 0.0
    recompute_ms: float = 0.0

    def matched(self, num_tokens: int, exact_len: int) -> None:
        """Note that SGLang gives the first `exact_len` tokens; the request has no K/V of its own yet."""
        self.num_tokens, self.lineage = num_tokens, Lineage(exact_len)
        self.num_taken = self.num_corrected = 0

    def loaded(self, spans: list[Span], sources: list[dict[str, object]]) -> None:
        """Note that `spans` were copied."""
        self.lineage.copy([span.report() for span in spans])
        self.lineage.recompute_gap(sum(span.recomputed for span in spans))
        self.sources += sources

    def withdraw(self) -> None:
        """Note that everything that was copied has been computed since, and all that had attended to it."""
        self.lineage.withdraw()
        self.sources, self.num_taken, self.num_corrected = [], 0, 0

    def attempt(self, policy: str) -> Attempt:
        """Sum up where the request stands."""
        timings_ms = {"lookup": self.lookup_ms, "graft": self.graft_ms}
        if self.recompute_ms:
            timings_ms["recompute"] = self.recompute_ms
        if self.has_read or self.reads is not None:
            timings_ms["read"] = self.read_ms
        report = request_report(
            self.lineage,
            self.num_tokens,
            policy=self.policy or policy,
            timings_ms=timings_ms,
            miss=self.miss,
            corrected_tokens=self.num_corrected,
            substitution=self.substitution,
        )
        return Attempt(report, tuple(self.sources), self.num_steps)

    def extent(self) -> tuple[int, int]:
        """Return how many tokens are copied or will be, and how many stand behind the last of them; one at least is.

        Exact ones do not count.
        """
        copied = [(span.target_start, span.length, span.fidelity) for span in self.lineage.spans]
        due = [(span.start, span.length, span.fidelity) for span in self.spans]
        spans = [(start, length) for start, length, fidelity in (*copied, *due) if fidelity is not Fidelity.EXACT]
        end = max(start + length for start, length in spans)
        return sum(length for _, length in spans), self.num_tokens - end

    def take_loaded(self) -> tuple[SpanReport, ...]:
        """Return what was loaded since the last call."""
        spans, self.num_taken = self.lineage.spans[self.num_taken :], len(self.lineage.spans)
        return spans

    def plan(self, num_tokens: int, spans: Sequence[SpanReport]) -> GraftPlan:
        """Say what of a prompt of `num_tokens` is computed, and that of all that was copied `spans` are what is looked at."""
        computed = np.ones(num_tokens, np.bool_)
        computed[: self.lineage.given_len] = False
        for span in self.lineage.spans:
            computed[span.target_start : span.target_start + span.length] = False
        matches = tuple(Match(span.target_start, span.donor_id, span.donor_start, span.length) for span in spans)
        return GraftPlan(num_tokens, self.lineage.given_len, matches, np.flatnonzero(computed))

    def adjoining(self, position: int) -> list[Span]:
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
