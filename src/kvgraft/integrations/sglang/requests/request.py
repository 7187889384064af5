"""A request on its way through prefill: its decision, its wait for stores, the slots it holds and the origin of its K/V.

What happens to a request is a method of `SGLangRequest`, which alone changes it, but for the lists of `held`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvgraft.graft.select import NoRecompute
from kvgraft.integrations.sglang.planning.spans import UNDECIDED, LoadDecision
from kvgraft.integrations.sglang.requests.records import (
    HeldSlots,
    MatchedPrompt,
    PassWork,
    PrefillAttempt,
    ReadOutcome,
    RequestPhase,
)
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.repair_time import RepairPlan
from kvgraft.reuse.report import request_report
from kvgraft.types import Fidelity, RepairTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.graft.steps import GraftWork
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.reuse.reads import StoredReads
    from kvgraft.types import Miss, Namespace, SpanReport

_NOT_MATCHED, _NO_PASSES, _BEFORE = MatchedPrompt(), PassWork(), RepairPlan(RepairTime.BEFORE)


@dataclass(slots=True, eq=False)
class SGLangRequest:
    """A request from its first match to its release. A retracted one begins anew, but for its `attempts`.

    Attributes:
        rid: SGLang's name of the request; clients choose it.
        attempts: Those before each retraction so far.
        is_reported: Not where an earlier attempt could not be summed up, which may have been worse than all that are known.
        phase: How far it is.
        prompt: As it was matched last.
        lineage: Origin of its K/V, from the last match on.
        decision: The answer to the last lookup.
        due: Spans still to be loaded, ascending.
        reads: Of stored donors; None but while `READING`.
        read: How these ended; None before: a request waits once.
        repair_plan: When the policy's choice is computed.
        held: Slots that it has; these change hands where they are, with no call in between that could fail.
        sources: By span of the lineage, the request that computed it and the tier from which it was copied.
        num_taken: Spans of the lineage of which the policy has had its choice.
        passes: What was computed of that choice.
        num_steps: Prefill steps that the gaps were cut into, the first one included.
        graft_ms: Time of all loads, but for those that failed.
        registered_len: Tokens from the start that are donors already.
        is_timed: Its prefill has been measured.
    """

    rid: str
    namespace: Namespace
    attempts: tuple[PrefillAttempt, ...] = ()
    is_reported: bool = True
    phase: RequestPhase = RequestPhase.NEW
    prompt: MatchedPrompt = _NOT_MATCHED
    lineage: Lineage = field(default_factory=lambda: Lineage(0))
    decision: LoadDecision = UNDECIDED
    due: list[LoadSpan] = field(default_factory=list)
    reads: StoredReads | None = None
    read: ReadOutcome | None = None
    repair_plan: RepairPlan = _BEFORE
    held: HeldSlots = field(default_factory=HeldSlots)
    sources: list[dict[str, object]] = field(default_factory=list)
    num_taken: int = 0
    passes: PassWork = _NO_PASSES
    num_steps: int = 1
    graft_ms: float = 0.0
    registered_len: int = 0
    is_timed: bool = False

    # What is known of it

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
        return self.prompt.num_tokens - self.prompt.prompt_len

    @property
    def repairs_after(self) -> bool:
        """Whether the policy's choice is computed with the second token."""
        return self.repair_plan.time is RepairTime.AFTER

    # Before admission

    def matched(self, prompt: MatchedPrompt, prefix_len: int, *, is_kept: bool = False) -> None:
        """SGLang gives the first `prefix_len` tokens, and the request has no K/V of its own yet.

        What was found for an earlier match may be kept; else donors are looked for after this.
        """
        self.prompt, self.lineage, self.num_taken = prompt, Lineage(prefix_len), 0
        self.passes = replace(self.passes, num_corrected=0)
        if is_kept:
            self.phase = RequestPhase.STALE
        else:
            self.phase = RequestPhase.WAITING if self.reads is None else RequestPhase.READING

    def decided(self, decision: LoadDecision) -> None:
        """A lookup was answered."""
        self.decision = decision

    def load_only(self, spans: Sequence[LoadSpan] = ()) -> None:
        """Nothing but `spans` is loaded."""
        self.due = list(spans)

    def refused(self, miss: Miss) -> None:
        """Nothing is loaded."""
        self.due = []
        self.decision = LoadDecision(miss=miss, lookup_ms=self.decision.lookup_ms)

    def planned(self, repair: RepairPlan) -> None:
        """It is known when the policy's choice is computed."""
        self.repair_plan = repair

    def reading(self, reads: StoredReads) -> None:
        """Reads have begun. The rest is planned again when they are over."""
        self.due, self.reads, self.phase = [], reads, RequestPhase.READING

    def read_over(self, miss: Miss | None, ms: float = 0.0) -> None:
        """Nothing is read any more: what there is is at hand, and `miss` says why there is not all of it."""
        self.reads, self.read, self.phase = None, ReadOutcome(miss, ms), RequestPhase.WAITING
        self.decision = replace(self.decision, depends_on=None)

    def forget_donors(self) -> None:
        """Everything that was promised is of donors that are gone."""
        self.due = []
        if self.phase is RequestPhase.READING:
            self.reads, self.phase = None, RequestPhase.WAITING

    # Loading

    def goes_on(self, position: int, min_run: int) -> None:
        """A further chunk begins at `position`; what is due before it is cut off, and the rest must be worth its copy.

        A request goes on from its exact prefix or not at all.
        """
        self.phase, self.num_steps = RequestPhase.STARTED, self.num_steps + 1
        due = [span for span in self.due if span.end > position and (span.start >= position or not span.goes_on)]
        after = [span if span.start >= position else span.after(position) for span in due]
        self.due = [span for span in after if span.start > position or span.length >= min_run]

    def take_due(self, position: int) -> list[LoadSpan]:
        """Return the spans that follow one another from `position` on, which are loaded now, and due no more."""
        self.phase, spans = RequestPhase.STARTED, self.adjoining(position)
        self.due = [span for span in self.due if span not in spans]
        return spans

    def missed(self, miss: Miss) -> None:
        """What was decided is not loaded; spans that are still due stay so."""
        self.decision = replace(self.decision, miss=miss)

    def loaded(self, spans: list[LoadSpan], sources: list[dict[str, object]], ms: float) -> None:
        """Spans were copied within `ms`; what the request goes on from comes first."""
        for span in spans:
            if span.goes_on:
                assert span.donor is not None
                self.lineage.go_on(span.end, span.donor.generation, start=span.start)
        self.lineage.copy([span.report() for span in spans if not span.goes_on])
        self.lineage.recompute_gap(sum(span.recomputed for span in spans))
        self.sources += sources
        self.graft_ms += ms

    def unload(self, start: int) -> None:
        """What was last copied, from `start` on, has no slots after all; what was copied before is as it was."""
        self.lineage.withdraw(start)
        num_spans = len(self.lineage.spans)
        self.num_taken, self.sources = min(self.num_taken, num_spans), self.sources[:num_spans]

    # Passes over chosen tokens

    def take_loaded(self) -> tuple[SpanReport, ...]:
        """Return the spans loaded since the last call."""
        spans, self.num_taken = self.lineage.spans[self.num_taken :], len(self.lineage.spans)
        return spans

    def recomputed(self, policy: str, work: GraftWork) -> None:
        """The choice of `policy` was computed."""
        self.lineage.recompute(work.recomputed_runs)
        num_corrected = self.passes.num_corrected + work.num_corrected
        self.passes = replace(self.passes, policy=policy, num_corrected=num_corrected)
        self.repaired()

    def repaired(self) -> None:
        """What was chosen so far is computed: tokens are drawn from that from now on."""
        self.passes = replace(self.passes, repair=self.repair_plan.report(self._next_drawn))

    def computed_from(self, start: int) -> None:
        """Everything from `start`, the first shifted copy, on was computed.

        Where that came after the first token, the lineage keeps the copies that it was drawn from. What the request goes on
        from stays approximate.
        """
        if not self.repairs_after:
            self.lineage.withdraw(start)
            self.num_taken, self.sources = len(self.lineage.spans), self.sources[: len(self.lineage.spans)]
            self.passes = replace(self.passes, num_corrected=0)
            return
        again = [
            span for span in self.lineage.spans if span.target_start >= start and span.fidelity is not Fidelity.EXACT
        ]
        self.lineage.recompute((span.target_start, span.length) for span in again)
        repair = replace(
            self.repair_plan.report(self._next_drawn),
            exact_from_token=None if self.lineage.generation_at(start) else self._next_drawn,
            healed_tokens=self.prompt.num_tokens - start,
        )
        self.passes = replace(self.passes, repair=repair)

    def left_as_copied(self) -> None:
        """A pass failed: what was copied stays as approximate as it was."""
        self.passes = replace(self.passes, policy=NoRecompute.name)

    def passes_took(self, ms: float) -> None:
        """Passes have ended, well or not."""
        self.passes = replace(self.passes, ms=self.passes.ms + ms)

    @property
    def _next_drawn(self) -> int:
        """Number of the first token of the answer that is drawn from what is computed now."""
        return self.num_drawn + int(self.repairs_after) + 1

    # What others get of it, and the end

    def registered(self, stop: int) -> None:
        """The first `stop` tokens are donors."""
        self.registered_len = stop

    def timed(self) -> None:
        """Its prefill was measured."""
        self.is_timed = True

    def retracted(self, policy: str) -> SGLangRequest:
        """Return the request as it begins anew."""
        attempts = (*self.attempts, self.attempt(policy))
        return SGLangRequest(self.rid, self.namespace, attempts, self.is_reported)

    def unreported(self) -> SGLangRequest:
        """Return the request as it begins anew where this attempt cannot be summed up: it has no report."""
        return SGLangRequest(self.rid, self.namespace, is_reported=False)

    def attempt(self, policy: str) -> PrefillAttempt:
        """Sum up where the request stands; `policy` is the server's."""
        passes, policy = self.passes, self.passes.policy or policy
        timings_ms = {"lookup": self.decision.lookup_ms, "graft": self.graft_ms}
        if passes.ms:
            timings_ms["recompute"] = passes.ms
        if self.reads is not None:
            timings_ms["read"] = self.reads.elapsed_ms
        elif self.read is not None:
            timings_ms["read"] = self.read.ms
        report = request_report(
            self.lineage,
            self.prompt.num_tokens,
            policy=policy,
            timings_ms=timings_ms,
            miss=self.decision.miss,
            corrected_tokens=passes.num_corrected,
            substitution=self.decision.substitution,
            repair=None if policy == NoRecompute.name else passes.repair or self.repair_plan.report(),
        )
        return PrefillAttempt(report, tuple(self.sources), self.num_steps)

    # What planning and passes ask

    def extent(self) -> tuple[int, int]:
        """Return how many tokens are moved or will be, and how many of the prompt stand after the last of them.

        One at least is moved. Those in their own places do not count.
        """
        copied = [(span.target_start, span.length, span.fidelity) for span in self.lineage.spans]
        due = [(span.start, span.length, span.fidelity) for span in self.due]
        spans = [(start, length) for start, length, fidelity in (*copied, *due) if fidelity is Fidelity.SHIFTED]
        end = max(start + length for start, length in spans)
        return sum(length for _, length in spans), self.prompt.prompt_len - end

    def adjoining(self, position: int) -> list[LoadSpan]:
        """Return the spans that follow one another from `position` on."""
        found: list[LoadSpan] = []
        for span in self.due:
            if span.start != position:
                break
            found.append(span)
            position = span.end
        return found

    def next_start(self, position: int) -> int | None:
        """Return the start of the next span after `position`, or None."""
        return next((span.start for span in self.due if span.start > position), None)
