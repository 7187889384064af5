"""Every interleaving of events at an attempt, with a failure at any command, against books that are kept by position."""

from __future__ import annotations

import pytest
from hypothesis import Phase as HypothesisPhase
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tests.support.attempt_port import END, SPANS, BrokenError, Port, Truth, make_claim

from kvgraft.errors import CorruptCacheError
from kvgraft.reuse.attempt import AskedPrompt, Attempt, AttemptPhase, commands, events
from kvgraft.reuse.lineage import Lineage
from kvgraft.reuse.outcome import GraftOutcome
from kvgraft.types import Fidelity, RepairReport, RepairTime

PREFIXES = (0, 4, SPANS[0][0])
FAILS = st.one_of(st.none(), st.none(), st.integers(-1, 5))
"""Number of the command that fails, -1 for the event itself; mostly none."""
REPAIRS = st.sampled_from([None, RepairTime.BEFORE, RepairTime.AFTER, RepairTime.AFTER])


class AttemptMachine(RuleBasedStateMachine):
    """One request after the other."""

    def __init__(self):
        super().__init__()
        self.port = Port()

    def _phase(self):
        return None if self.port.attempt is None else self.port.attempt.phase

    @property
    def is_live(self):
        return self.port.attempt is not None and not self.port.has_ended

    @property
    def runs(self):
        port = self.port
        if not self.is_live or not port.attempt.is_admitted or port.attempt.phase is AttemptPhase.OVER:
            return False
        claim = port.attempt.claim
        return port.job is None or (claim is not None and not claim.asynchronous and port.job[0] == "copy")

    @precondition(
        lambda self: self.port.attempt is None or (self._phase() is AttemptPhase.OVER and self.port.has_ended)
    )
    @rule(prefix=st.sampled_from(PREFIXES), asynchronous=st.booleans(), generation=st.integers(0, 1), repair=REPAIRS)
    def comes(self, prefix, asynchronous, generation, repair):
        self.port.check()
        epoch = self.port.epoch
        self.port = Port()
        self.port.epoch = epoch
        self.port.kv = [Truth(0, epoch)] * prefix
        claim = make_claim(prefix_len=prefix, asynchronous=asynchronous, generation=generation, repair=repair)
        self.port.look_up(claim, prefix)

    @precondition(lambda self: self._phase() in (AttemptPhase.WAITING, AttemptPhase.STALE))
    @rule(fails=FAILS, how=st.sampled_from(["as promised", "as promised", "as promised", "without", "cut"]))
    def is_admitted(self, fails, how):
        claim = self.port.attempt.claim
        if claim is None:
            self.port.admit(0, fails_at=fails)
            return
        self.port.admit({"as promised": claim.num_tokens, "without": 0, "cut": 3}[how], fails_at=fails)

    @precondition(lambda self: self.is_live and self._phase() is not AttemptPhase.OVER)
    @rule(count=st.integers(1, 4))
    def goes_on(self, count):
        """What comes next where nothing happens."""
        for _ in range(count):
            if self._phase() in (AttemptPhase.WAITING, AttemptPhase.STALE):
                claim = self.port.attempt.claim
                self.port.admit(0 if claim is None else claim.num_tokens)
            elif self.port.job is not None:
                self.port.copied("made")
            elif self.port.repairing is not None:
                self.port.repaired("made")
            else:
                self.port.step()
            self.port.check()

    @precondition(lambda self: self.port.job is not None)
    @rule(fails=FAILS, kind=st.sampled_from(["made", "waited", "fell back", "failed", "gone"]))
    def copy_ends(self, fails, kind):
        self.port.copied(kind, fails_at=fails)

    @precondition(lambda self: self.runs and self.port.job is None)
    @rule()
    def step(self):
        self.port.step()

    @precondition(lambda self: self.runs and self.port.job is not None and self.port.repairing is None)
    @rule()
    def runs_ahead(self):
        self.port.run_ahead()

    @precondition(lambda self: self.port.repairing is not None and self.port.job is None)
    @rule(fails=FAILS, kind=st.sampled_from(["made", "fell back", "failed", "gone"]))
    def repair_ends(self, fails, kind):
        self.port.repaired(kind, fails_at=fails)

    @precondition(lambda self: self.runs and self.port.job is None)
    @rule(kept=st.sampled_from([0, 4, 8, 12, 20]), fails=FAILS, asynchronous=st.booleans(), repair=REPAIRS)
    def is_preempted(self, kept, fails, asynchronous, repair):
        port = self.port
        port.preempt()
        kept = min(kept, len(port.kv))
        claim = make_claim(prefix_len=kept, asynchronous=asynchronous, repair=repair)
        port.look_up(claim, kept, fails_at=fails)

    @precondition(
        lambda self: self._phase() in (AttemptPhase.WAITING, AttemptPhase.STALE) and self.port.was_begun_again
    )
    @rule()
    def hears_of_an_earlier_attempt(self):
        self.port.copied_late()

    @precondition(lambda self: self._phase() in (AttemptPhase.WAITING, AttemptPhase.STALE))
    @rule()
    def is_looked_up_in_vain(self):
        self.port.fail_lookup()

    @precondition(lambda self: self.is_live)
    @rule(is_rare=st.integers(0, 2))
    def is_reset(self, is_rare):
        if not is_rare:
            self.port.reset()

    @precondition(lambda self: self.is_live and self._phase() is not AttemptPhase.OVER)
    @rule(fails=FAILS)
    def ends(self, fails):
        self.port.finish(fails_at=fails)

    @invariant()
    def holds(self):
        self.port.check()


TestAttempt = AttemptMachine.TestCase
TestAttempt.settings = settings(max_examples=150, stateful_step_count=25)


def test_what_a_request_computed_between_its_copies_others_may_have_copied():
    """Blocks of one text and generation have one name: those that it finds as it begins again may be of another request."""
    port = Port()
    port.look_up(make_claim(prefix_len=0, asynchronous=False), 0)
    port.admit(END)
    port.copied("made")
    port.step()
    port.preempt()
    port.look_up(None, 24)
    spans = [(span.target_start, span.length, span.fidelity) for span in port.attempt.lineage.spans]
    assert spans == [(8, 10, Fidelity.SHIFTED), (18, 4, Fidelity.CONTINUED), (22, 2, Fidelity.SHIFTED)]


def test_no_graft_that_fell_back_is_repaired_though_its_outcome_could_not_be_taken():
    port = Port()
    port.look_up(make_claim(prefix_len=0, asynchronous=False, repair=RepairTime.AFTER), 0)
    port.admit(END)
    port.copied("fell back", fails_at=-1)
    assert not port.attempt.owes_repair
    for _ in range(2):
        port.step()
        port.check()
    assert port.attempt.phase is AttemptPhase.SETTLED


def test_a_repair_that_was_made_with_the_copy_is_reported_so_and_not_made_again():
    port = Port()
    port.look_up(make_claim(prefix_len=0, asynchronous=False, repair=RepairTime.AFTER), 0)
    port.admit(END)
    port.copied("waited")
    assert port.attempt.repair == RepairReport(RepairTime.BEFORE, "unsure", from_token=1)
    assert not port.attempt.owes_repair
    port.step()
    port.step()
    port.check()
    assert port.repairing is None


def test_a_repair_that_ran_ahead_of_such_an_outcome_is_no_second_failure():
    port = Port()
    port.look_up(make_claim(prefix_len=0, asynchronous=False, repair=RepairTime.AFTER), 0)
    port.admit(END)
    port.run_ahead()
    port.copied("fell back", fails_at=-1)
    port.repaired("gone")
    port.check()
    assert port.num_failed == 1
    assert port.attempt.phase is AttemptPhase.SETTLED


def _without(command, event):
    """An attempt that commands less after an event."""

    def take_back(patch):
        receive = Attempt.receive

        def less(self, what):
            made = receive(self, what)
            return tuple(one for one in made if not (isinstance(what, event) and isinstance(one, command)))

        patch.setattr(Attempt, "receive", less)

    return take_back


def _after(event, change):
    """An attempt of which `change` is made to what it was before an event, after it."""

    def take_back(patch):
        receive = Attempt.receive

        def other(self, what):
            before = {name: getattr(self, name) for name in _FIELDS}
            made = receive(self, what)
            if isinstance(what, event):
                change(self, before)
            return made

        patch.setattr(Attempt, "receive", other)

    return take_back


_FIELDS = ("_phase", "_is_due", "repair", "outcome", "earlier", "graft")


def _as_before(*names):
    def change(attempt, before):
        for name in names:
            setattr(attempt, name, before[name])

    return change


def _patched(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def _still_due(attempt, before):
    if attempt.claim is None and before["_is_due"]:
        attempt._phase, attempt._is_due, attempt.graft = AttemptPhase.UNREPAIRED, True, before["graft"]


def _due_again(attempt, before):
    if attempt.outcome is not None and attempt.outcome.waited and before["_is_due"]:
        attempt._phase, attempt._is_due = AttemptPhase.UNREPAIRED, True


def _keep_waiting(attempt, before):
    if before["_phase"] is AttemptPhase.COPYING:
        attempt._phase, attempt.outcome = AttemptPhase.COPYING, None


TAKEN_BACK = {
    # fix: what was wrong before it, its idea undone, and the invariant that finds it
    "1d50f30 own blocks count as exact after a preemption": (
        _patched(AskedPrompt, "lineage_after", lambda self, *_: Lineage(self.cached_len)),
        "exact|generation|report",
    ),
    "1d50f30 a reset does not reach what waits": (_after(events.Reset, _as_before("_phase", "_is_due")), "epoch|repair|pins"),
    "7e2e9dd history is lost where a request begins again": (
        _patched(Attempt, "again", lambda _, prompt, *__: Attempt(prompt, prompt.lineage())),
        "report|promise",
    ),
    "9e1f737 others go on from what ended before its repair": (_without(commands.Hide, events.Finished), "hidden"),
    "e0fcc03 a preempted request leaves its blocks to be found": (_without(commands.Hide, events.Preempted), "hidden"),
    "b19f37c workers keep what a replaced attempt was to repair": (_without(commands.Cancel, events.Replaced), "end"),
    "b19f37c a replaced attempt keeps pins and texts": (_without(commands.Release, events.Replaced), "pins|texts"),
    "b19f37c a text that cannot be kept keeps its room": (_without(commands.Discard, events.Failed), "cost|texts"),
    "b19f37c an outcome that cannot be taken is awaited for ever": (
        _after(events.Failed, _keep_waiting),
        "outcome|end",
    ),
    "ba32754 the engine counts on a graft that cannot be sent": (_without(commands.Void, events.Failed), "promise"),
    "10c72a1 a failed graft counts as cached": (_without(commands.Recount, events.Copied), "counts"),
    "10c72a1 a planned reset is an error": (
        _patched(GraftOutcome, "is_error", property(lambda self: bool(self.fell_back))),
        "counts",
    ),
    "6b93ac2 a failure is not counted": (_without(commands.Count, events.Failed), "counts"),
    "6b93ac2 a repair that failed is not counted": (_without(commands.Count, events.Repaired), "counts"),
    "05d6c29 a token is drawn before its repair": (_without(commands.RepairNow, events.Ran), "repair"),
    "2228715 a graft that failed is repaired": (_after(events.Copied, _still_due), "repair"),
    "what was repaired before the first token is repaired again": (_after(events.Copied, _due_again), "repair"),
    "7e0af5e gaps of a graft that failed stay open": (_without(commands.Keep, events.Copied), "texts"),
    "64b328c donors stay pinned after their copy": (_without(commands.Unpin, events.Copied), "pins"),
    "64b328c donors stay pinned where there is no room": (_without(commands.Unpin, events.Admitted), "pins"),
    "a cancelled load goes on": (_without(commands.Cancel, events.Finished), "end"),
    "a request that ended keeps room": (_without(commands.Discard, events.Finished), "texts"),
    "a request that ended with its graft is not counted": (_without(commands.Tell, events.Copied), "end"),
    "a request that ended is not counted": (_without(commands.Tell, events.Finished), "end"),
    "a late outcome takes the next attempt's promise": (
        _patched(Attempt, "is_copying", property(lambda self: self.outcome is None)),
        "promise|pins|texts|outcome|report|end",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fix", TAKEN_BACK)
def test_a_fix_that_is_taken_back_is_found(fix, monkeypatch):
    take_back, invariants = TAKEN_BACK[fix]
    take_back(monkeypatch)
    with pytest.raises((BrokenError, CorruptCacheError), match=rf"^({invariants}):"):
        run_state_machine_as_test(AttemptMachine, settings=_BUDGET)


_BUDGET = settings(
    max_examples=3000,
    stateful_step_count=25,
    phases=[HypothesisPhase.generate],
    report_multiple_bugs=False,
    derandomize=True,
    database=None,
    deadline=None,
)
