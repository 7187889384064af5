"""A port for `kvgraft.reuse.attempt` that has an engine, its workers and its books in a few lines, and may fail anywhere.

One request runs in it. K/V are a `Truth` per position: how often they were copied, and which model computed them. The books
are kept here position by position, without `kvgraft.reuse.lineage`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from kvgraft.reuse.attempt import AskedPrompt, Attempt, AttemptPhase, drive
from kvgraft.reuse.attempt import commands as to_do
from kvgraft.reuse.attempt import events as done
from kvgraft.reuse.claim import Claim
from kvgraft.reuse.decision import Decision
from kvgraft.reuse.outcome import GraftOutcome
from kvgraft.reuse.repair_time import RepairPlan
from kvgraft.types import DonorId, GraftPlan, Match, Miss, MissReason, Namespace

NUM_TOKENS = 40
SPANS = ((8, 10), (22, 8))
"""Start and length of what a graft copies."""
END = 30
PAGE = 4
_GIVE_BACK = {to_do.Unpin, to_do.Discard, to_do.Release, done.Admitted, done.Copied}
"""What leaves books half changed where it fails; anything else costs itself."""
_CHANGES = ("copy", "recompute", "withdraw")


class Truth(NamedTuple):
    depth: int
    epoch: int


class BrokenError(Exception):
    """What must hold does not; the message begins with the name of the invariant."""


class Port:
    """An engine with one request. A rule of a test calls one method, then `check`."""

    def __init__(self):
        self.epoch = 0
        self.attempt = None
        self.claim_epoch = 0
        self.kv = []
        self.pins = self.texts = self.gaps = 0
        self.job = None
        self.unrepaired = None
        self.repairing = None
        self.counts_on = 0
        self.cached = 0
        self.is_hidden = True
        self.was_reset = self.is_cancelled = False
        self.is_doubtful = False
        self.fails_at = None
        self.num_failed = self.num_errors = self.num_expected = 0
        self.told = []
        self.num_final = 0
        self.worst_copied = 0
        self.least_exact = NUM_TOKENS
        self.num_drawn = 0
        self.was_begun_again = self.has_ended = False
        self.failed = []

    # ---- the engine

    def send(self, event, *, fails_at=None):
        """Deliver an event; the command of number `fails_at` fails, or the event itself at -1."""
        attempt = self.attempt
        assert attempt is not None
        if fails_at == -1:
            lineage = attempt.lineage

            def fail(*_):
                for name in _CHANGES:
                    lineage.__dict__.pop(name, None)
                raise MemoryError("lineage")

            lineage.__dict__.update(dict.fromkeys(_CHANGES, fail))
        self.fails_at = fails_at
        drive(attempt, event, self._do, self._failed)
        self.fails_at = None
        for name in _CHANGES:
            attempt.lineage.__dict__.pop(name, None)

    def look_up(self, claim, prefix_len, *, fails_at=None):
        """Begin an attempt, the first one or once more; the engine's cache gives `prefix_len` positions."""
        self._settle()
        exact = next((n for n, truth in enumerate(self.kv[:prefix_len]) if truth.depth), prefix_len)
        depth = max((truth.depth for truth in self.kv[:prefix_len]), default=0)
        prompt = AskedPrompt(
            "one", Namespace("m"), np.arange(NUM_TOKENS + self.num_drawn, dtype=np.int32), NUM_TOKENS, prefix_len,
            exact_len=exact, generation=depth,
        )  # fmt: skip
        known = self.attempt
        if known is None:
            self.attempt = Attempt(prompt, prompt.lineage())
        else:
            following = known.again(prompt, "p", PAGE)
            self.send(done.Replaced(), fails_at=fails_at)
            if self.unrepaired is not None and not self.num_failed:
                raise BrokenError("end: workers keep what a request that begins again was to have repaired")
            self.unrepaired = self.repairing = None
            self.attempt, self.was_begun_again = following, True
        del self.kv[prefix_len:]
        self.is_hidden = self.was_reset = self.is_cancelled = False
        self.counts_on = self.cached = 0
        failure = self.attempt.earlier.failure
        self.attempt.decide(failure or claim or Miss(MissReason.NO_MATCH), 1.0)
        if self.attempt.claim is not None:
            self.pins, self.claim_epoch = 1, self.epoch

    def fail_lookup(self):
        self._settle()
        self.send(done.Replaced(Miss(MissReason.ERROR, "the lookup failed")))
        if self.attempt.phase is AttemptPhase.OVER:
            self.attempt = None

    def admit(self, num_tokens, *, fails_at=None):
        self._settle()
        self.counts_on = self.cached = num_tokens
        claim = self.attempt.claim
        is_cut = claim is not None and num_tokens not in (0, claim.num_tokens)
        self.num_expected += is_cut and self.attempt.phase is AttemptPhase.WAITING
        self.send(done.Admitted(num_tokens, () if claim is None else claim.decision.tiers), fails_at=fails_at)
        if num_tokens and self.job is None:
            raise BrokenError("promise: the engine counts on a graft that nobody makes")

    def copied(self, kind, *, fails_at=None):
        """The workers' word about the job."""
        self._settle()
        what, claim = self.job
        self.job = None
        if self.attempt.phase is AttemptPhase.OVER:
            return  # it could not be cancelled, and nobody waits for it
        if what != "copy":
            outcome = GraftOutcome((), 0.0, 0.0, "void", failed=True, is_gone=what == "gone")
        elif kind == "made" or (kind == "waited" and not claim.repairs_after):
            outcome = GraftOutcome((), 1.0, 1.0)
        elif kind == "waited":  # the repair was made with the copy
            outcome = GraftOutcome((), 1.0, 1.0, waited="unsure")
        else:
            is_gone, failed = kind == "gone", kind != "fell back"
            outcome = GraftOutcome((), 1.0, 1.0, kind, failed=failed, is_gone=is_gone)
            self.num_expected += not is_gone
        self._make(claim, outcome)
        if self.told:  # it ended in this step, with a token that was drawn from what is made
            self._note_answer()
        self.counts_on = 0
        is_counted = self.cached == claim.num_tokens
        num_copied = 0 if outcome.fell_back else sum(span.length for span in claim.plan.spans)
        self.send(done.Copied(outcome), fails_at=fails_at)
        if self.attempt.is_copying:
            raise BrokenError("outcome: an outcome was told and is still awaited")
        if is_counted and self.cached != num_copied and not self.num_failed:
            raise BrokenError("counts: tokens that were computed count as cached")

    def copied_late(self):
        """The outcomes of an attempt before the present one."""
        self._settle()
        pins = self.pins
        self.send(done.Repaired(GraftOutcome((), 1.0, 1.0)))
        self.num_expected += 1
        self.send(done.Copied(GraftOutcome((), 1.0, 1.0, "late", failed=True)))
        if pins and not self.pins:
            raise BrokenError("promise: an outcome of an earlier attempt takes a later one's donors")

    def _make(self, claim, outcome):
        for span in claim.plan.spans:
            self._compute(span.target_start)
            if outcome.fell_back:
                self._compute(span.target_end)
            else:
                self.kv += [Truth(span.generation + 1, self.claim_epoch)] * span.length
        self._compute(claim.end)
        is_kept = claim.repairs_after and self.epoch == self.claim_epoch and not self.is_cancelled
        if not outcome.fell_back and not outcome.waited and is_kept:
            self.unrepaired = None if self.repairing is claim else claim

    def _compute(self, stop):
        depth = max((truth.depth for truth in self.kv), default=0)
        self.kv += [Truth(depth, self.epoch)] * (stop - len(self.kv))

    def step(self, *, fails_at=None):
        """Run the next rows of the request; a whole prompt draws a token."""
        self._settle()
        start = len(self.kv)
        self.send(done.Ran(start), fails_at=fails_at)
        is_second = start >= NUM_TOKENS
        if is_second and self.unrepaired is not None and not self.was_reset and not self.num_failed:
            raise BrokenError("repair: a token is drawn over copies that were to be repaired first")
        self._compute(NUM_TOKENS if start < NUM_TOKENS else start + 1)
        self.num_drawn += 1
        self._note_answer()

    def run_ahead(self):
        """Schedule the step of the second token before it is known how the copy of the first one's step ended."""
        self._settle()
        self.num_drawn = max(self.num_drawn, 1)
        self.send(done.Ran(NUM_TOKENS))

    def _note_answer(self):
        prompt = self.kv[:NUM_TOKENS]
        copies = sum(truth.depth > 0 and self._is_copied(at) for at, truth in enumerate(prompt))
        self.worst_copied = max(self.worst_copied, copies)
        self.least_exact = min(self.least_exact, sum(not truth.depth for truth in prompt))

    def _is_copied(self, position):
        return any(start <= position < start + length for start, length in SPANS)

    def repaired(self, kind, *, fails_at=None):
        self._settle()
        self.repairing = None
        is_gone, failed = kind == "gone", kind in ("gone", "failed")
        outcome = GraftOutcome((), 1.0, 1.0, "" if kind == "made" else kind, failed=failed, is_gone=is_gone)
        self.num_expected += kind in ("failed", "fell back") and self.attempt.phase is AttemptPhase.REPAIRING
        self.send(done.Repaired(outcome), fails_at=fails_at)

    def preempt(self):
        self._settle()
        if self.job is not None or self.attempt.is_copying:
            return  # engines preempt nobody that waits for a copy
        is_final = self.unrepaired is None and (self.repairing is None or self.attempt.claim is None)
        self.send(done.Preempted())
        if not is_final and not self.is_hidden and not self.was_reset:
            raise BrokenError("hidden: others go on from what was to be repaired")

    def reset(self):
        """New weights, say: all donors are forgotten, by workers too, which give up what is under way."""
        self.epoch += 1
        self._forget(is_lost=False)

    def finish(self, *, fails_at=None):
        self._settle()
        awaits = self.unrepaired is not None and not self.was_reset
        self.has_ended = True
        self.send(done.Finished(self.num_drawn), fails_at=fails_at)
        if awaits and not self.is_hidden and not self.num_failed:
            raise BrokenError("hidden: others go on from what was to be repaired")
        if self.attempt.phase is not AttemptPhase.OVER and self.job is None and self.repairing is None:
            raise BrokenError("end: an outcome is awaited that nobody will tell")

    # ---- commands

    def _do(self, command: to_do.Command) -> None:  # noqa: C901, PLR0912 - a row per command
        if self.fails_at == 0:
            self.fails_at = None
            raise MemoryError(type(command).__name__)
        if self.fails_at is not None:
            self.fails_at -= 1
        match command:
            case to_do.Open():
                self.texts, self.gaps = 1, 1
            case to_do.Copy(claim):
                if self.claim_epoch != self.epoch:
                    raise BrokenError("epoch: K/V of a model that is gone are copied")
                self._send_job("copy", claim)
            case to_do.Void(claim, _, is_gone):
                self._send_job("gone" if is_gone else "void", claim)
            case to_do.RepairNow(claim):
                if self.unrepaired is not claim and self.job is None:
                    raise BrokenError("repair: workers have nothing of what they are to repair")
                self.unrepaired, self.repairing = None, claim
            case to_do.Cancel():  # workers hear of it with the next step; a synchronous copy is through by then
                self.job = None if self.job is None or self.job[1].asynchronous else self.job
                self.unrepaired, self.is_cancelled = None, True
            case to_do.Hide(is_settled):
                self.is_hidden = self.is_hidden or not is_settled
            case to_do.Unpin():
                self.pins = 0
            case to_do.Keep():
                self.gaps = 0
            case to_do.Close():
                self.texts = 0
            case to_do.Discard():
                self.texts = self.gaps = 0
            case to_do.Release():
                self.pins = self.texts = self.gaps = 0
            case to_do.Recount(num_promised, num_computed):
                self.cached -= num_computed if self.cached == num_promised else 0
            case to_do.Count():
                self.num_errors += 1
            case to_do.Tell(is_final):
                self.told.append(self.attempt.report("p"))
                self.num_final += is_final

    def _send_job(self, what, claim):
        if self.job is not None:
            raise BrokenError("promise: a graft is sent twice")
        self.job = what, claim

    def _failed(self, what, error):
        if isinstance(error, BrokenError):
            raise error
        if isinstance(what, to_do.Count):  # nobody counts that, nor what it was to count
            self.num_expected -= 2
        self.num_failed += 1
        self.failed.append(type(what))
        self.is_doubtful = True

    def _settle(self):
        """Verify the books where something failed, as adapters do before they read them; begin anew if they do not hold."""
        if not self.is_doubtful:
            return
        self.is_doubtful = False
        try:
            self._check_books()
        except BrokenError as error:
            if not _GIVE_BACK.intersection(self.failed):
                raise BrokenError(f"cost: all donors are forgotten because of {self.failed}: {error}") from error
            self._forget(is_lost=True)

    def _forget(self, *, is_lost):
        self.pins = 0  # a donor that is gone is pinned no more
        if self.attempt is not None:
            self.send(done.Reset(is_lost))
        self.unrepaired, self.was_reset, self.is_hidden = None, True, True
        if self.job is not None and self.job[0] == "copy":
            self.job = "gone", self.job[1]
        if is_lost:
            self.texts = self.gaps = 0

    # ---- what must hold

    def check(self):
        if self.attempt is None:
            return
        if not self.is_doubtful:
            self._check_books()
        self._check_truth()
        phase = self.attempt.phase
        if phase is AttemptPhase.OVER and not self.num_failed and (self.unrepaired is not None or self.job is not None):
            raise BrokenError("end: workers keep what belongs to nobody")
        if self.num_errors > self.num_failed + self.num_expected:
            raise BrokenError("counts: an error is counted where nothing failed")
        if self.job is None and self.num_errors < self.num_failed + self.num_expected:
            raise BrokenError("counts: a failure is not counted")
        if self.num_final > 1:
            raise BrokenError("end: a request is counted twice")
        if phase is AttemptPhase.OVER and self.has_ended and not self.num_failed and self.num_final != 1:
            raise BrokenError("end: a request that has ended is not counted")

    def _check_books(self):
        attempt = self.attempt
        needs_pins = attempt.claim is not None and (attempt.is_waiting or attempt.is_copying)
        needs_pins = needs_pins and not (self.job is not None and self.job[0] != "copy")
        if self.pins and not needs_pins:
            raise BrokenError("pins: donors are pinned for nothing")
        if not self.pins and needs_pins and attempt.phase is AttemptPhase.WAITING:
            raise BrokenError("pins: donors of a promise are not pinned")
        if attempt.phase is AttemptPhase.OVER and (self.texts or self.gaps):
            raise BrokenError("texts: room is kept for nothing")
        if self.gaps and not attempt.is_copying:
            raise BrokenError("texts: gaps are kept open after their graft")

    def _check_truth(self):
        attempt = self.attempt
        attempt.lineage.check()
        if attempt.is_copying or not attempt.is_admitted:
            return  # the copy is sent, or nothing is there
        known = self.kv[:NUM_TOKENS]
        first = next((at for at, truth in enumerate(known) if truth.depth), len(known))
        if attempt.lineage.exact_len(len(known)) > first:
            raise BrokenError("exact: approximate K/V pass for exact")
        if attempt.lineage.generation_at(len(known)) < max((truth.depth for truth in known), default=0):
            raise BrokenError("generation: copies of copies are called younger than they are")
        is_copied = self.worst_copied or any(truth.depth for truth in known)
        if (
            attempt.lineage.has_copies and not is_copied and not self.num_failed
        ):  # after a failure a report errs upwards
            raise BrokenError("report: copies are named that nobody made")
        for report in self.told[-1:]:
            reused = report.shifted_tokens + report.continued_tokens
            if reused < self.worst_copied or report.exact_tokens > self.least_exact:
                raise BrokenError("report: it is better than the answer")


def make_claim(*, prefix_len, asynchronous, generation=0, repair=None):
    """A graft of `SPANS` after `prefix_len` positions, of donors of `generation`."""
    matches = [Match(start, DonorId(n), 0, length, generation=generation) for n, (start, length) in enumerate(SPANS)]
    spans = tuple(match.part(prefix_len, END) for match in matches if match.target_end > prefix_len)
    donors = tuple(SimpleNamespace(donor_id=span.donor_id, start_position=0, generation=generation) for span in spans)
    tiers = ("host",) * len(spans)
    decision = Decision(GraftPlan.over(NUM_TOKENS, prefix_len, spans), donors=donors, tiers=tiers)
    plan = None if repair is None else RepairPlan(repair)
    return Claim(decision, END, (), (), spans[0].target_start, asynchronous, 12, plan, 4)
