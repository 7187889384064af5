"""A request on its way through prefill: its decision, its wait for stores, the slots it holds and the origin of its K/V."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select import NoRecompute
from kvgraft.integrations.sglang.planning.spans import UNDECIDED, LoadDecision
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.report import report_as_dict, request_report
from kvgraft.types import Fidelity, GraftPlan, Match, RepairReport, RepairTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.graft.steps import GraftWork
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.reuse.reads import StoredReads
    from kvgraft.types import GraftReport, Miss, Namespace, SpanReport


_BEFORE = RepairReport(RepairTime.BEFORE)


class ReadPhase(Enum):
    """Progress of a request's one wait for stores."""

    NOT_BEGUN = "not begun"
    UNDER_WAY = "under way"
    OVER = "over"


@dataclass(frozen=True, slots=True, eq=False)
class StoreWait:
    """The wait of a request for stores: reads while they are under way, then why they were of no use, if they were not."""

    phase: ReadPhase = ReadPhase.NOT_BEGUN
    reads: StoredReads | None = None
    miss: Miss | None = None
    ms: float = 0.0


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


@dataclass(slots=True, eq=False)
class SGLangRequest:
    """A request from its first match to its release. A retracted one begins anew, but for its `attempts`.

    Attributes:
        rid: SGLang's name of the request; clients choose it.
        attempts: Those before each retraction so far.
        lineage: Origin of its K/V, from the last match on.
        num_tokens: Length of the prompt, with output that was generated before a retraction.
        prompt_len: Length of the prompt alone, for which reuse is planned, so that no retraction changes what is chosen.
        matched_at: When it was last matched, in seconds of some clock.
        end: Positions from it on are computed, by the last match.
        is_decided: Donors were looked for since it came, or began again.
        is_kept: At the last match they were not: what was found before may have changed, and is not to be loaded.
        due: Spans still to be loaded, ascending.
        sources: By span of the lineage, the request that computed it and the tier from which it was copied.
        is_timed: Its prefill has been measured.
        registered_len: Tokens from the start that are donors already.
        policy: Policy that chose tokens to compute again; empty for none.
        repair: When the policy's choice is computed.
        num_taken: Spans of the lineage of which the policy has had its choice.
        num_corrected: Reused tokens that were corrected for drift and not computed again.
        num_steps: Prefill steps that the gaps were cut into, the first one included.
        graft_ms: Time of all copies.
        recompute_ms: Time of passes over chosen tokens, beside SGLang's own.
        is_reported: Not where an earlier attempt could not be summed up, which may have been worse than all that are known.
    """

    rid: str
    namespace: Namespace
    attempts: tuple[PrefillAttempt, ...] = ()
    lineage: Lineage = field(default_factory=lambda: Lineage(0))
    num_tokens: int = 0
    prompt_len: int = 0
    matched_at: float = 0.0
    end: int = 0
    is_decided: bool = False
    is_kept: bool = False
    decision: LoadDecision = UNDECIDED
    due: list[LoadSpan] = field(default_factory=list)
    wait: StoreWait = StoreWait()
    held: HeldSlots = field(default_factory=HeldSlots)
    sources: list[dict[str, object]] = field(default_factory=list)
    is_timed: bool = False
    registered_len: int = 0
    policy: str = ""
    repair: RepairReport = _BEFORE
    num_taken: int = 0
    num_corrected: int = 0
    num_steps: int = 1
    graft_ms: float = 0.0
    recompute_ms: float = 0.0
    is_reported: bool = True

    @property
    def reads(self) -> StoredReads | None:
        """Reads of stored donors that are under way."""
        return self.wait.reads

    @property
    def miss(self) -> Miss | None:
        """Why nothing is planned, or was loaded."""
        return self.decision.miss

    @property
    def has_shifted(self) -> bool:
        """Whether tokens were copied of which a policy may have some computed."""
        return any(span.fidelity is Fidelity.SHIFTED for span in self.lineage.spans)

    @property
    def has_moved(self) -> bool:
        """Whether tokens were moved, or will be."""
        return self.has_shifted or any(span.fidelity is Fidelity.SHIFTED for span in self.due)

    @property
    def num_drawn(self) -> int:
        """Tokens of the answer that were generated before a retraction."""
        return self.num_tokens - self.prompt_len

    def matched(self, num_tokens: int, prompt_len: int, prefix_len: int, now: float) -> None:
        """Note that SGLang gives the first `prefix_len` tokens; the request has no K/V of its own yet."""
        self.num_tokens, self.prompt_len = num_tokens, min(num_tokens, prompt_len)
        self.lineage, self.matched_at = Lineage(prefix_len), now
        self.num_taken = self.num_corrected = 0

    def missed(self, miss: Miss) -> None:
        """Note why what was decided is not loaded; spans that are still due stay so."""
        self.decision = replace(self.decision, miss=miss)

    def refuse(self, miss: Miss) -> None:
        """Load nothing."""
        self.due = []
        self.decision = LoadDecision(miss=miss, lookup_ms=self.decision.lookup_ms)

    def forget_donors(self) -> None:
        """Give up everything that was promised of donors that are gone."""
        self.due = []
        if self.wait.phase is ReadPhase.UNDER_WAY:
            self.wait = StoreWait()

    def retracted(self, policy: str) -> SGLangRequest:
        """Return the request as it begins anew."""
        attempts = (*self.attempts, self.attempt(policy))
        return SGLangRequest(self.rid, self.namespace, attempts, is_reported=self.is_reported)

    def unreported(self) -> SGLangRequest:
        """Return the request as it begins anew where this attempt cannot be summed up: it has no report."""
        return SGLangRequest(self.rid, self.namespace, is_reported=False)

    def loaded(self, spans: list[LoadSpan], sources: list[dict[str, object]]) -> None:
        """Note that `spans` were copied; what the request goes on from comes first."""
        for span in spans:
            if span.goes_on:
                assert span.donor is not None
                self.lineage.go_on(span.end, span.donor.generation, start=span.start)
        self.lineage.copy([span.report() for span in spans if not span.goes_on])
        self.lineage.recompute_gap(sum(span.recomputed for span in spans))
        self.sources += sources

    def unload(self, start: int) -> None:
        """Note that what was last copied, from `start` on, has no slots after all; what was copied before is as it was."""
        self.lineage.withdraw(start)
        num_spans = len(self.lineage.spans)
        self.num_taken, self.sources = min(self.num_taken, num_spans), self.sources[:num_spans]

    def withdraw(self, start: int) -> None:
        """Note that everything from `start`, the first shifted copy, on was computed since."""
        self.lineage.withdraw(start)
        self.num_taken, self.num_corrected = len(self.lineage.spans), 0
        self.sources = self.sources[: self.num_taken]

    def recomputed(self, policy: str, work: GraftWork) -> None:
        """Note that the choice of `policy` was computed."""
        self.policy = policy
        self.lineage.recompute(work.recomputed_runs)
        self.num_corrected += work.num_corrected

    def repaired(self, num_drawn: int) -> None:
        """Note that the choice of the policy was computed when `num_drawn` tokens of the answer had been drawn."""
        self.repair = replace(self.repair, from_token=num_drawn + 1)

    def computed_in_full(self, start: int, num_drawn: int) -> None:
        """Note that the prompt was computed from `start`, the first shifted copy, on, when `num_drawn` tokens were drawn.

        These rest on the copies, so the lineage keeps them. What the request goes on from stays approximate.
        """
        again = [
            span for span in self.lineage.spans if span.target_start >= start and span.fidelity is not Fidelity.EXACT
        ]
        self.lineage.recompute((span.target_start, span.length) for span in again)
        exact_from = None if self.lineage.generation_at(start) else num_drawn + 1
        self.repair = replace(
            self.repair,
            from_token=num_drawn + 1,
            exact_from_token=exact_from,
            healed_tokens=self.num_tokens - start,
        )

    def attempt(self, policy: str) -> PrefillAttempt:
        """Sum up where the request stands."""
        timings_ms = {"lookup": self.decision.lookup_ms, "graft": self.graft_ms}
        if self.recompute_ms:
            timings_ms["recompute"] = self.recompute_ms
        if self.wait.phase is not ReadPhase.NOT_BEGUN:
            timings_ms["read"] = self.wait.ms
        policy = self.policy or policy
        report = request_report(
            self.lineage,
            self.num_tokens,
            policy=policy,
            timings_ms=timings_ms,
            miss=self.decision.miss,
            corrected_tokens=self.num_corrected,
            substitution=self.decision.substitution,
            repair=None if policy == NoRecompute.name else self.repair,
        )
        return PrefillAttempt(report, tuple(self.sources), self.num_steps)

    def extent(self) -> tuple[int, int]:
        """Return how many tokens are moved or will be, and how many of the prompt stand after the last of them.

        One at least is moved. Those in their own places do not count.
        """
        copied = [(span.target_start, span.length, span.fidelity) for span in self.lineage.spans]
        due = [(span.start, span.length, span.fidelity) for span in self.due]
        spans = [(start, length) for start, length, fidelity in (*copied, *due) if fidelity is Fidelity.SHIFTED]
        end = max(start + length for start, length in spans)
        return sum(length for _, length in spans), self.prompt_len - end

    def take_loaded(self) -> tuple[SpanReport, ...]:
        """Return the spans loaded since the last call."""
        spans, self.num_taken = self.lineage.spans[self.num_taken :], len(self.lineage.spans)
        return spans

    def plan(self, num_tokens: int, spans: Sequence[SpanReport]) -> GraftPlan:
        """Return the plan of a prompt of `num_tokens` as it was carried out, with `spans` for those that are looked at."""
        computed = np.ones(num_tokens, np.bool_)
        computed[: self.lineage.prefix_len] = False
        for span in self.lineage.spans:
            computed[span.target_start : span.target_start + span.length] = False
        matches = tuple(Match(span.target_start, span.donor_id, span.donor_start, span.length) for span in spans)
        return GraftPlan(num_tokens, self._settled_end, matches, np.flatnonzero(computed))

    @property
    def _settled_end(self) -> int:
        """End of the exact prefix and of what was copied right after it in its own place."""
        end = self.lineage.prefix_len
        for span in self.lineage.spans:
            if span.target_start != end or span.fidelity not in (Fidelity.EXACT, Fidelity.CONTINUED):
                break
            end += span.length
        return end

    def adjoining(self, position: int) -> list[LoadSpan]:
        """Return the spans that follow one another from `position` on."""
        found: list[LoadSpan] = []
        for span in self.due:
            if span.start != position:
                break
            found.append(span)
            position = span.end
        return found

    def drop(self, spans: list[LoadSpan]) -> None:
        """Forget spans that were loaded or cannot be."""
        self.due = [span for span in self.due if span not in spans]

    def pass_by(self, position: int, min_run: int) -> None:
        """Cut off everything before `position`; the rest of a span must be worth its copy.

        A request goes on from its exact prefix or not at all.
        """
        due = [span for span in self.due if span.end > position and (span.start >= position or not span.goes_on)]
        after = [span if span.start >= position else span.after(position) for span in due]
        self.due = [span for span in after if span.start > position or span.length >= min_run]

    def next_start(self, position: int) -> int | None:
        """Return the start of the next span after `position`, or None."""
        return next((span.start for span in self.due if span.start > position), None)
