"""The state machine of an attempt; `kvgraft.reuse.attempt` says what it is for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from kvgraft.errors import CorruptCacheError
from kvgraft.reuse.attempt.commands import (
    Cancel,
    Close,
    Copy,
    Count,
    Credit,
    Discard,
    Hide,
    Keep,
    Open,
    Recount,
    Release,
    RepairNow,
    Tell,
    Unpin,
    Void,
)
from kvgraft.reuse.attempt.events import (
    Admitted,
    Copied,
    Failed,
    Finished,
    Preempted,
    Ran,
    Repaired,
    Replaced,
    Reset,
)
from kvgraft.reuse.claim import Claim
from kvgraft.reuse.lineage import Lineage, reused_span
from kvgraft.reuse.report import request_report, worst_report
from kvgraft.types import Miss, MissReason, RepairReport, RepairTime

if TYPE_CHECKING:
    from kvgraft.reuse.attempt.commands import Command
    from kvgraft.reuse.attempt.events import Event
    from kvgraft.reuse.attempt.prompt import AskedPrompt
    from kvgraft.reuse.outcome import GraftOutcome
    from kvgraft.types import GraftReport

_SECOND = 2
"""Number of the token that a repair after the first one comes with."""


class AttemptPhase(Enum):
    """Progress of an attempt. Nothing but `Attempt.receive` changes it."""

    WAITING = "waiting"
    """Looked up, without places for its K/V."""
    STALE = "stale"
    """As `WAITING`, but the donors that the lookup found are gone: it is looked up anew, or its copy fails at once."""
    COPYING = "copying"
    """Has places; the graft is being made."""
    UNREPAIRED = "unrepaired"
    """The graft is made; what the policy chooses of it is computed with the second token."""
    REPAIRING = "repairing"
    """The repair is being made. How the copy ended may still be on its way: `Attempt.is_copying`."""
    SETTLED = "settled"
    """Has places, and nothing is under way or due."""
    OVER = "over"
    """Ended, and no outcome is awaited."""


_WITHOUT_PLACES = (AttemptPhase.WAITING, AttemptPhase.STALE)


@dataclass(frozen=True, slots=True, eq=False)
class Earlier:
    """Report of the attempts that had places, and why a graft of them failed: it is not tried again."""

    report: GraftReport | None = None
    failure: Miss | None = None


_UNDECIDED = Miss(MissReason.NO_MATCH, "nothing was grafted")


class Attempt:
    """One attempt at a request. Not thread-safe.

    A handler of an event makes what it needs first and changes the attempt last, so that one that raises has changed
    nothing, but for the lineage of a graft that then fails.

    Attributes:
        prompt: As it was asked for.
        lineage: Origin of its K/V; one object for all attempts.
        earlier: Attempts before it.
        graft: The graft that is promised or made, or why there is none.
        lookup_ms: Duration of the lookup.
        outcome: Of the copy, then of the repair; None while the first is awaited.
        repair: When the choice of the policy is computed, as far as it is known; None if nothing is chosen.
    """

    def __init__(self, prompt: AskedPrompt, lineage: Lineage, earlier: Earlier | None = None) -> None:
        """Begin with a prompt of which nothing is decided; what the engine has of it is in `lineage`."""
        self.prompt = prompt
        self.lineage = lineage
        self.earlier = earlier or Earlier()
        self.graft: Claim | Miss = _UNDECIDED
        self.lookup_ms = 0.0
        self.outcome: GraftOutcome | None = None
        self.repair: RepairReport | None = None
        self._phase = AttemptPhase.WAITING
        self._is_due = self._is_void = self._is_void_again = self._has_ended = False

    @property
    def phase(self) -> AttemptPhase:
        """How far it is."""
        return self._phase

    @property
    def claim(self) -> Claim | None:
        """The graft, if one is promised or made."""
        return self.graft if isinstance(self.graft, Claim) else None

    @property
    def is_waiting(self) -> bool:
        """Whether what was decided holds, and the engine has not given it places."""
        return self._phase is AttemptPhase.WAITING

    @property
    def is_admitted(self) -> bool:
        """Whether the engine gave it places."""
        return self._phase not in _WITHOUT_PLACES

    @property
    def is_copying(self) -> bool:
        """Whether the graft was sent and its outcome is not known."""
        return self._phase is AttemptPhase.COPYING or (self._phase is AttemptPhase.REPAIRING and self.outcome is None)

    @property
    def owes_repair(self) -> bool:
        """Whether a repair comes with the second token, and has not been sent: positions of the graft may still change."""
        return self._is_due and self._phase in (AttemptPhase.COPYING, AttemptPhase.UNREPAIRED)

    def decide(self, graft: Claim | Miss, lookup_ms: float) -> None:
        """Take what was decided after the lookup."""
        self.graft, self.lookup_ms = graft, lookup_ms

    def restore(self, prefix_len: int) -> None:
        """Note that a store beside the engine's cache gives exact K/V, up to position `prefix_len`."""
        self.lineage = Lineage(prefix_len)

    def again(self, prompt: AskedPrompt, policy: str, page_size: int) -> Attempt:
        """Return the next attempt, of which `policy` and pages of `page_size` tokens are the engine's."""
        earlier = replace(self.earlier, report=self.report(policy)) if self.is_admitted else self.earlier
        known = Lineage(prompt.exact_len) if earlier.report is None else self.lineage
        return Attempt(prompt, prompt.lineage_after(known, page_size), earlier)

    def receive(self, event: Event) -> tuple[Command, ...]:  # noqa: PLR0911 - a row per event
        """Take an event, and return what follows from it, in order."""
        match event:
            case Admitted():
                return self._admitted(event)
            case Copied(outcome):
                return self._copied(outcome)
            case Ran(start):
                return self._ran(start)
            case Repaired(outcome):
                return self._repaired(outcome)
            case Preempted():
                return (Hide(is_settled=self._phase is AttemptPhase.SETTLED),)
            case Replaced(miss):
                return self._replaced(miss)
            case Reset(is_lost):
                return self._reset(is_lost=is_lost)
            case Finished(num_drawn):
                return self._finished(num_drawn)
            case Failed(what, reason):
                return self._failed(what, reason)

    def _admitted(self, event: Admitted) -> tuple[Command, ...]:
        claim = self.claim
        if self.is_admitted:
            return ()
        if claim is None:
            self._phase = AttemptPhase.SETTLED
            return ()
        if not event.num_tokens:
            self.graft = Miss(MissReason.NO_ROOM, "the engine admitted the request without its graft")
            self._phase = AttemptPhase.SETTLED
            return (Unpin(),)
        if self._phase is AttemptPhase.STALE:
            return self._void(claim, "donors were forgotten before the request was admitted", is_gone=True)
        if claim.num_tokens != event.num_tokens:
            return self._void(claim, "the engine cut the graft")
        claim = claim.lying_in(event.tiers)
        is_substituted = claim.decision.substitution is not None
        spans = [
            reused_span(span, donor, tier=tier, is_substituted=is_substituted)
            for span, donor, tier in claim.decision.spans()
        ]
        repair, commands = self._planned(claim), (Open(claim), Copy(claim), Credit(claim))
        self.lineage.copy(spans)
        if claim.front:
            self.lineage.expose(claim.plan.prefix_len, claim.front_generation - 1)
        self.graft, self.repair, self._is_due, self._phase = claim, repair, claim.repairs_after, AttemptPhase.COPYING
        return commands

    def _planned(self, claim: Claim) -> RepairReport | None:
        plan = claim.repair
        if plan is None:
            return None
        return plan.report(self.prompt.num_generated + 1 if plan.time is RepairTime.BEFORE else None)

    def _void(self, claim: Claim, reason: str, *, is_gone: bool = False) -> tuple[Command, ...]:
        """Have the copy fail: the engine waits for it, or takes its tokens for computed."""
        commands = (*(() if is_gone else (Count(),)), Unpin(), Void(claim, reason, is_gone))
        self.repair, self._is_due, self._is_void, self._phase = None, False, True, AttemptPhase.COPYING
        return commands

    def _copied(self, outcome: GraftOutcome) -> tuple[Command, ...]:
        errors = self._errors(outcome)
        miss = Miss(outcome.miss_reason, outcome.fell_back)
        earlier = self.earlier
        if outcome.failed and not outcome.is_gone and earlier.failure is None:
            earlier = replace(earlier, failure=miss)
        claim = self.claim
        if claim is None or not self.is_copying:  # the request has begun again: what it was promised since stays
            commands = (*errors, *self._outcome_taken())
            self.earlier, self._phase = earlier, AttemptPhase.OVER if self._has_ended else self._phase
            return commands
        recount = Recount(claim.num_tokens, claim.num_tokens if outcome.fell_back else claim.num_gap_tokens)
        commands = (*errors, Unpin(), recount, Keep(not outcome.failed), *self._outcome_taken())
        if outcome.fell_back:
            self.lineage.withdraw(claim.plan.prefix_len)
            self.graft, self.repair, self._is_due, phase = miss, None, False, AttemptPhase.SETTLED
        else:
            self.lineage.recompute(outcome.recomputed_runs)
            phase = AttemptPhase.UNREPAIRED if self._is_due else AttemptPhase.SETTLED
            phase = AttemptPhase.REPAIRING if self._phase is AttemptPhase.REPAIRING else phase
            if outcome.waited:
                self.repair = RepairReport(RepairTime.BEFORE, outcome.waited, from_token=self.prompt.num_generated + 1)
                self._is_due, phase = False, AttemptPhase.SETTLED
        self.earlier, self.outcome, self._phase = earlier, outcome, AttemptPhase.OVER if self._has_ended else phase
        return commands

    def _errors(self, outcome: GraftOutcome) -> tuple[Command, ...]:
        """Count an outcome that is an error, unless it was counted when the copy was made void."""
        return (Count(),) if outcome.is_error and not (self._is_void and self.is_copying) else ()

    def _outcome_taken(self) -> tuple[Command, ...]:
        """What follows the last outcome that a request which has ended waited for."""
        return (Tell(is_final=True),) if self._has_ended else ()

    def _ran(self, start: int) -> tuple[Command, ...]:
        claim = self.claim
        if not self.owes_repair or claim is None or start < claim.plan.num_tokens:
            return ()
        commands = (RepairNow(claim),)
        self._is_due, self._phase = False, AttemptPhase.REPAIRING
        return commands

    def _repaired(self, outcome: GraftOutcome) -> tuple[Command, ...]:
        """Take over what a repair changed: the first token was drawn before it, so that its graft is still reported."""
        if self._phase is not AttemptPhase.REPAIRING or self.is_copying:
            return ()
        assert self.repair is not None
        assert self.outcome is not None
        assert self.claim is not None
        commands = (*self._errors(outcome), *self._outcome_taken())
        repair, known = self.repair, self.outcome
        if outcome.failed:
            repair = replace(repair, reason=outcome.fell_back)
        else:
            known = replace(outcome, read_ms=known.read_ms)
            repair = replace(repair, from_token=_SECOND)
        if outcome.fell_back and not outcome.failed:
            plan, is_exact = self.claim.plan, self.prompt.exact_len == self.prompt.prefix_len
            repair = replace(
                repair,
                reason=outcome.fell_back,
                exact_from_token=_SECOND if is_exact else None,
                healed_tokens=plan.num_tokens - plan.spans[0].target_start,
            )
        if not outcome.failed:
            self.lineage.recompute(outcome.recomputed_runs)
        self.repair, self.outcome = repair, known
        self._phase = AttemptPhase.OVER if self._has_ended else AttemptPhase.SETTLED
        return commands

    def _replaced(self, miss: Miss | None) -> tuple[Command, ...]:
        commands = (*((Cancel(),) if self.owes_repair else ()), Release())
        if self.is_admitted:
            self._phase = AttemptPhase.OVER
        elif miss is not None:
            self.graft = miss
        return commands

    def _reset(self, *, is_lost: bool) -> tuple[Command, ...]:
        is_waiting = not self.is_admitted
        commands = (Discard(), *((Unpin(),) if is_waiting else ()))
        if self.owes_repair and self.repair is not None:
            self.repair = replace(self.repair, reason="donors were forgotten before the second token")
        self._is_due = False
        if is_waiting:
            self._phase = AttemptPhase.STALE
        elif self._phase is AttemptPhase.UNREPAIRED:
            self._phase = AttemptPhase.SETTLED
        elif is_lost and not self._has_ended and self._phase is AttemptPhase.REPAIRING:
            self._phase = AttemptPhase.COPYING if self.is_copying else AttemptPhase.SETTLED
        if is_lost:
            self._recover()
        return commands

    def _recover(self) -> None:
        """Begin the lineage anew where it does not hold: of one with places it is not known what it has."""
        try:
            self.lineage.check()
        except CorruptCacheError:
            if self.is_admitted:
                self._phase = AttemptPhase.OVER
            else:
                self.lineage = self.prompt.lineage()

    def _finished(self, num_drawn: int) -> tuple[Command, ...]:
        claim = self.claim if self.is_copying else None
        cancelled = (Cancel(),) if claim is not None and claim.asynchronous else ()
        # A repair that is due never comes: no request is to go on from what it would have changed.
        unrepaired = (Cancel(), Hide()) if self.owes_repair else ()
        closed = (*cancelled, *unrepaired, Unpin(), Close())
        # Of an answer that ended with its first token, no later one was drawn from what a repair under way changes.
        awaits_repair = self._phase is AttemptPhase.REPAIRING and num_drawn > 1
        if awaits_repair or (claim is not None and not claim.asynchronous):
            commands = (*closed, Tell(is_final=False))
            self._has_ended, self._is_due = True, False
            return commands
        commands = (*closed, Discard(), Tell(is_final=True))
        if claim is not None:
            miss = Miss(MissReason.DEADLINE, "the request ended before its graft")
            self.lineage.withdraw(claim.plan.prefix_len)
            self.graft = miss
        self._is_due, self._phase = False, AttemptPhase.OVER
        return commands

    def _failed(self, what: Event | Command, reason: str) -> tuple[Command, ...]:  # noqa: PLR0911 - a row each
        """Go on with as little as can be. What it held may be half given back: that is for the books to find."""
        match what:
            case Admitted(num_tokens) if num_tokens and self.claim is not None and not self.is_admitted:
                return self._void(self.claim, reason)
            case Copy(claim):
                return self._void(claim, reason)
            case Void(claim) if not self._is_void_again:
                self._is_void_again = True
                return (Count(), Void(claim, reason))
            case Copied(outcome) | Repaired(outcome):
                return (Count(), *self._errors(outcome), *self._gave_up(what, outcome))
            case Replaced() | Finished():
                self._phase = AttemptPhase.OVER if isinstance(what, Finished) or self.is_admitted else self._phase
                return (Count(), Cancel(), Hide(), Release())
            case Keep() | Close():
                return (Count(), Discard())
            case Count():
                return ()
        return (Count(),)

    def _gave_up(self, what: Copied | Repaired, outcome: GraftOutcome) -> tuple[Command, ...]:
        """Go on where an outcome could not be taken: what was copied counts as copied, even if it was computed since."""
        commands = (Release(),)
        if isinstance(what, Copied) and self.is_copying:
            self.outcome = outcome
            if outcome.fell_back or outcome.waited:  # workers have nothing that could be repaired
                self.repair, self._is_due, self._phase = None, False, AttemptPhase.SETTLED
            elif self._phase is AttemptPhase.COPYING:
                self._phase = AttemptPhase.UNREPAIRED if self._is_due else AttemptPhase.SETTLED
        elif self._phase is AttemptPhase.REPAIRING:
            self._phase = AttemptPhase.SETTLED
        if self._has_ended:
            self._phase = AttemptPhase.OVER
        return commands

    def report(self, policy: str) -> GraftReport:
        """Return what was reused for the prompt, by the worst attempt at it; pure."""
        graft, outcome = self.graft, self.outcome
        timings = {"lookup": self.lookup_ms}
        if outcome is not None:
            timings |= {"graft": outcome.inject_ms, "recompute": outcome.compute_ms}
            timings |= {"read": outcome.read_ms} if outcome.read_ms else {}
        report = request_report(
            self.lineage,
            self.prompt.num_prompt_tokens,
            policy=policy,
            corrected_tokens=0 if outcome is None else outcome.corrected_tokens,
            timings_ms=timings,
            miss=graft if isinstance(graft, Miss) else None,
            substitution=graft.decision.substitution if isinstance(graft, Claim) else None,
            repair=self.repair,
        )
        if self.earlier.report is None:
            return report
        worst = worst_report((report, self.earlier.report))
        return replace(worst, repair=_since_the_first(self.earlier.report.repair, report.repair))


def _since_the_first(earlier: RepairReport | None, repair: RepairReport | None) -> RepairReport | None:
    """Join the repairs of two attempts: the first one's, with the token from which on either had repaired K/V."""
    if earlier is None or earlier.from_token is not None:
        return earlier or repair
    return earlier if repair is None else replace(earlier, from_token=repair.from_token)
