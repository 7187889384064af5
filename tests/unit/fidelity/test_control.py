"""The statistics of a held risk: against mapie and ville, and on simulated streams of audits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mapie.risk_control.fwer_control import control_fwer
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value
from scipy.stats import beta, binom
from ville import BettingTest

from kvgraft.fidelity.control import (
    OFF,
    AnswerPart,
    EProcess,
    LossSample,
    RiskController,
    RiskEvent,
    RiskTarget,
    clopper_pearson,
    fixed_sequence,
    hoeffding_bentkus,
    trials_needed,
)
from kvgraft.fidelity.control.notches import notches_of
from kvgraft.graft.select import FirstK, NoRecompute, QuerySeam
from kvgraft.types import RepairTime, RiskStatus

EPSILON, DELTA = 0.02, 0.05
STREAMS = 400
SAMPLES = [
    (0, 1, 0.02),
    (0, 149, 0.02),
    (3, 200, 0.05),
    (9, 100, 0.05),
    (40, 3_000, 0.02),
    (150, 20_000, 0.01),
    (7, 7, 0.3),
]


class TestPValues:
    @pytest.mark.parametrize(("losses", "trials", "epsilon"), SAMPLES)
    def test_clopper_pearson_is_the_binomial_tail(self, losses, trials, epsilon):
        assert clopper_pearson(losses, trials, epsilon) == pytest.approx(binom.cdf(losses, trials, epsilon), rel=1e-9)

    @pytest.mark.parametrize(("losses", "trials", "epsilon"), SAMPLES)
    @pytest.mark.parametrize("share", [1.0, 0.37])
    def test_hoeffding_bentkus_is_mapie_s(self, losses, trials, epsilon, share):
        mean = share * losses / trials
        # mapie rounds `mean * trials` up; where that is a whole number but for rounding, both are fed what gives it.
        expected = compute_hoeffding_bentkus_p_value(np.array([mean]), trials, epsilon)[0, 0]
        assert hoeffding_bentkus(mean * trials, trials, epsilon) == pytest.approx(min(1.0, expected), rel=1e-9)

    def test_without_a_sample_nothing_is_rejected(self):
        assert clopper_pearson(0, 0, EPSILON) == hoeffding_bentkus(0.0, 0, EPSILON) == 1.0

    def test_limits_of_losses_that_are_not_binary_are_wider(self):
        counted, measured = (LossSample(200, 3.0, is_binary).upper_limit(DELTA) for is_binary in (True, False))
        assert hoeffding_bentkus(3.0, 200, measured) == pytest.approx(DELTA, rel=1e-3)
        assert 3 / 200 < counted < measured < 0.1
        assert LossSample(0, 0.0, is_binary=True).upper_limit(DELTA) == pytest.approx(1, abs=1e-6)

    def test_they_are_valid(self):
        """At a risk of exactly epsilon, p-values below delta are as rare as they promise; exact sums over all samples."""
        counts = np.arange(301)
        weights = binom.pmf(counts, 300, EPSILON)
        for p_value in (clopper_pearson, hoeffding_bentkus):
            rejected = [p_value(int(count), 300, EPSILON) <= DELTA for count in counts]
            assert 0 < weights[rejected].sum() <= DELTA

    @pytest.mark.parametrize(
        ("losses", "trials", "published"), [(0, 100, 2.95), (0, 300, 0.99), (1, 300, 1.57), (5, 1_000, 1.05)]
    )
    def test_upper_limit(self, losses, trials, published):
        limit = LossSample(trials, losses, is_binary=True).upper_limit(DELTA)
        assert limit == pytest.approx(beta.ppf(1 - DELTA, losses + 1, trials - losses), abs=1e-6)
        assert 100 * limit == pytest.approx(published, abs=0.01)

    @pytest.mark.parametrize("rate", [0.0, 0.002, 0.01])
    def test_trials_needed_are_enough_and_fewer_are_not(self, rate):
        needed = trials_needed(EPSILON, DELTA, rate)
        assert clopper_pearson(math.ceil(rate * needed), needed, EPSILON) <= DELTA
        if rate == 0:
            assert needed == 149
            assert clopper_pearson(0, needed - 1, EPSILON) > DELTA

    @pytest.mark.parametrize("rate", [0.02, 0.5, 0.0199999])
    def test_no_number_is_enough_at_epsilon(self, rate):
        assert trials_needed(EPSILON, DELTA, rate) is None


class TestFixedSequence:
    def test_is_mapie_s(self):
        rng = np.random.default_rng(5)
        for _ in range(200):
            p_values = rng.random(6) ** 4
            expected = control_fwer(p_values, DELTA, "fixed_sequence")
            assert list(range(fixed_sequence(p_values.tolist(), DELTA))) == list(expected)

    def test_ends_at_the_first_failure(self):
        assert fixed_sequence([0.01, 0.2, 0.001], DELTA) == 1
        assert fixed_sequence([0.2, 0.001], DELTA) == 0
        assert fixed_sequence([], DELTA) == 0

    def test_holds_delta_over_all_settings(self):
        """Six settings of growing risk, the third one above epsilon: bold ones are accepted in at most 5 % of samples."""
        risks = np.array([0.001, 0.005, 0.021, 0.03, 0.05, 0.1])
        losses = np.random.default_rng(6).binomial(600, risks, (2_000, 6))
        accepted = [fixed_sequence([clopper_pearson(int(k), 600, EPSILON) for k in row], DELTA) for row in losses]
        wrong = np.mean(np.array(accepted) > 2)
        assert wrong <= DELTA + 2 * math.sqrt(DELTA * (1 - DELTA) / 2_000)
        assert np.mean(np.array(accepted) >= 1) > 0.99


class TestEProcess:
    @pytest.mark.parametrize("epsilon", [EPSILON, 0.3])
    @pytest.mark.parametrize("kind", [EProcess.certificate, EProcess.alarm])
    def test_each_bet_is_ville_s(self, kind, epsilon, monkeypatch):
        """Its test bets what fits best, cut at a limit; where that is made to be without end, it bets the limit.

        Wealth that is bet anew is ville's too, begun at that audit.
        """
        monkeypatch.setattr("ville.sequential._plugin_lambda", lambda i, *_: np.full(np.shape(i), np.inf))
        losses = np.random.default_rng(7).choice([0.0, 0.0, 0.0, 0.4, 1.0], 80)
        process = kind(epsilon)
        found = []
        for loss in losses:
            process.update(loss)
            found.append(float(process.log_e))
        # What is bet anew at audit n is in proportion to 1 / (n ln(n)^2), whose sum over all n from 2 on is 2.10974...
        starts = {1: 1 - process.restarted}
        starts |= {n: process.restarted / 2.10975 / (n * math.log(n) ** 2) for n in range(2, 81) if process.restarted}
        wealth = np.zeros(80)
        for bet in process.bets:
            for start, portion in starts.items():
                wealth[start - 1 :] += (
                    portion * np.exp(ville_path(bet, epsilon, losses[start - 1 :])) / len(process.bets)
                )
        np.testing.assert_allclose(found, np.log(wealth), rtol=1e-9, atol=1e-9)

    def test_what_is_bet_anew_adds_up_to_what_is_kept_back(self):
        """However many audits there are: the rest of the sum beyond N is below the integral, 1 / ln(N)."""
        numbers = np.arange(2, 1_000_001)
        assert np.sum(1 / (numbers * np.log(numbers) ** 2)) + 1 / math.log(1_000_000) <= 2.1098
        process = EProcess((1e-12,), 0.5, restarted=0.1)  # a bet of nothing keeps what it was given
        for _ in range(20_000):
            process.update(0.5)
        assert math.log(0.97) < process.log_e < 0

    def test_many_streams_are_many_processes(self):
        losses = np.random.default_rng(8).random((3, 50)) ** 8
        together = EProcess.alarm(EPSILON)
        alone = [EProcess.alarm(EPSILON) for _ in range(3)]
        for column in losses.T:
            together.update(column)
            for process, loss in zip(alone, column, strict=True):
                process.update(loss)
        np.testing.assert_allclose(together.log_e, [process.log_e for process in alone], rtol=1e-12)

    @pytest.mark.parametrize("epsilon", [0.001, 0.02, 0.4, 0.9])
    @pytest.mark.parametrize("kind", [EProcess.certificate, EProcess.alarm])
    def test_no_loss_ruins_a_bet(self, kind, epsilon):
        process = kind(epsilon)
        for loss in (0.0, 1.0, 1.0, 0.0, 0.5):
            process.update(loss)
        assert np.isfinite(process.log_wealth).all()

    def test_an_alarm_after_a_long_calm_comes_almost_as_fast(self):
        """Bets alone would have lost in 3,000 calm audits what takes as many losses to win back."""
        calm, late = EProcess.alarm(EPSILON), EProcess(EProcess.alarm(EPSILON).bets, EPSILON)
        for process in (calm, late):
            for _ in range(3_000):
                process.update(0.0)
        needed = []
        for process in (EProcess.alarm(EPSILON), calm, late):
            before = process.num_losses
            while not process.exceeds(DELTA):
                process.update(1.0)
            needed.append(process.num_losses - before)
        fresh, restarted, bets_alone = needed
        assert fresh <= 3
        assert restarted <= 7
        assert bets_alone > 2 * restarted


def ville_path(bet, epsilon, losses):
    """Logarithms of the wealth of one bet, by ville's test of a mean, fed loss by loss."""
    limit = bet * epsilon if bet > 0 else -bet * (1 - epsilon)
    test = BettingTest(epsilon, alternative="greater" if bet > 0 else "less", c=limit)
    path = []
    for loss in losses:
        test.update(np.array([loss]))
        path.append(test._log_up if bet > 0 else test._log_down)
    return np.array(path)


def first_crossings(process, risk, num_audits, seed):
    """At which audit each of 400 streams reaches `1 / delta`; `num_audits + 1` where it does not."""
    rng = np.random.default_rng(seed)
    first = np.full(STREAMS, num_audits + 1)
    for number in range(1, num_audits + 1):
        process.update(rng.random(STREAMS) < risk)
        first[(first > num_audits) & (process.log_e >= -math.log(DELTA))] = number
    return first


class TestStreams:
    """Audits needed at epsilon 2 % and delta 5 %: medians of 400 streams; what was published for this design in brackets."""

    @pytest.mark.parametrize(("risk", "low", "high"), [(0.0, 214, 214), (0.005, 300, 385)])  # (214, 342)
    def test_certificate(self, risk, low, high):
        assert low <= np.median(first_crossings(EProcess.certificate(EPSILON), risk, 3_000, seed=1)) <= high

    @pytest.mark.parametrize(("risk", "low", "high"), [(0.05, 175, 245), (0.1, 33, 48)])  # (209, 42)
    def test_alarm(self, risk, low, high):
        assert low <= np.median(first_crossings(EProcess.alarm(EPSILON), risk, 3_000, seed=2)) <= high

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [EProcess.certificate, EProcess.alarm])
    def test_false_ones_over_20_000_audits_are_rare(self, kind):
        false = np.mean(first_crossings(kind(EPSILON), EPSILON, 20_000, seed=3) <= 20_000)
        assert 0.0 < false <= 0.055

    def test_evidence_of_one_kind_is_never_of_the_other(self):
        """A certifying process that bets the wrong way would certify what an alarm should stop."""
        assert (first_crossings(EProcess.certificate(EPSILON), 0.1, 2_000, seed=4) > 2_000).all()
        assert (first_crossings(EProcess.alarm(EPSILON), 0.0, 2_000, seed=4) > 2_000).all()


NOTCHES = ("full", "50 %", "10 %", "none")


@pytest.fixture
def controller():
    return RiskController(RiskTarget("first_token", EPSILON, DELTA, NOTCHES), start=3)


def audit(controller, losses, reuse_class="shifted", notch=None):
    """Audit requests as they would be served; returns the events with their number."""
    events = []
    for number, loss in enumerate(losses, 1):
        at = controller.notch(reuse_class) if notch is None else notch
        event = controller.audit(reuse_class, at, loss)
        if event is not None:
            events.append((number, event))
    return events


class TestController:
    def test_states_the_calibration_until_audits_say_more(self, controller):
        statement = controller.statement("shifted")
        assert (statement.status, statement.notch, statement.audits) == (RiskStatus.CALIBRATED, "none", 0)
        assert (statement.epsilon, statement.delta, statement.loss) == (EPSILON, DELTA, "first_token")
        assert controller.statements() == {}

    def test_audits_without_losses_certify(self, controller):
        assert audit(controller, [0.0] * 300) == [(214, RiskEvent.CERTIFIED)]
        statement = controller.statement("shifted")
        assert (statement.status, statement.audits) == (RiskStatus.CERTIFIED, 300)
        assert controller.statement("another class").status is RiskStatus.CALIBRATED

    def test_a_breach_tightens_and_a_second_one_switches_off(self, controller):
        (number, event), *rest = audit(controller, [1.0] * 20)
        assert event is RiskEvent.TIGHTENED
        assert number <= 3
        assert [event for _, event in rest] == [RiskEvent.SWITCHED_OFF]
        assert controller.notch("shifted") == OFF
        assert controller.statement("shifted") == controller.statements()["shifted"]["whole"]
        assert controller.statement("shifted").status is RiskStatus.BREACHED
        assert controller.statement("shifted").notch == "full"
        assert controller.notch("in_place") == 3

    def test_what_is_off_stays_off(self, controller):
        audit(controller, [1.0] * 20)
        assert audit(controller, [0.0] * 1_000) == []
        assert controller.notch("shifted") == OFF

    def test_a_certificate_does_not_end_the_watch(self, controller):
        audit(controller, [0.0] * 214)
        events = audit(controller, [1.0] * 100)
        assert events[0][1] is RiskEvent.TIGHTENED
        assert controller.statement("shifted").status is RiskStatus.BREACHED

    def test_the_tighter_notch_begins_without_evidence_and_can_be_certified(self, controller):
        while controller.notch("shifted") == 3:
            controller.audit("shifted", 3, 1.0)
        assert controller.statement("shifted").audits == 0
        assert audit(controller, [0.0] * 214) == [(214, RiskEvent.CERTIFIED)]
        assert controller.statement("shifted").notch == "10 %"

    def test_audits_of_another_notch_are_left_out(self, controller):
        assert audit(controller, [1.0] * 50, notch=2) == []
        assert controller.notch("shifted") == 3
        assert controller.statement("shifted").audits == 0

    def test_from_the_most_conservative_notch_a_breach_switches_off(self):
        controller = RiskController(RiskTarget("first_token", EPSILON, DELTA, NOTCHES), start=1)
        assert [event for _, event in audit(controller, [1.0] * 20)] == [RiskEvent.SWITCHED_OFF]


AFTER = ("full", "50 % before", "50 %", "10 %", "none")
"""Notches of a policy whose choice is computed after the first token: at the first two none is drawn before it."""


class TestParts:
    @pytest.fixture
    def controller(self):
        return RiskController(RiskTarget("first_token", EPSILON, DELTA, AFTER, num_waiting=2), start=3)

    def feed(self, controller, part, losses):
        """Audit one part of the answers of a class; returns the events."""
        found = (controller.audit("shifted", controller.notch("shifted"), loss, part) for loss in losses)
        return [event for event in found if event is not None]

    def test_each_has_evidence_of_its_own(self, controller):
        assert self.feed(controller, AnswerPart.LATER, [0.0] * 214) == [RiskEvent.CERTIFIED]
        assert self.feed(controller, AnswerPart.FIRST, [0.0] * 213) == []
        found = controller.statements()["shifted"]
        assert {part: (known.status, known.audits) for part, known in found.items()} == {
            "first": (RiskStatus.CALIBRATED, 213),
            "later": (RiskStatus.CERTIFIED, 214),
        }
        assert self.feed(controller, AnswerPart.FIRST, [0.0]) == [RiskEvent.CERTIFIED]

    def test_an_answer_is_stated_by_its_weaker_part(self, controller):
        both = (AnswerPart.FIRST, AnswerPart.LATER)
        assert controller.statement("shifted", both).part == "first"
        self.feed(controller, AnswerPart.FIRST, [0.0] * 50)
        assert controller.statement("shifted", both).part == "later"
        self.feed(controller, AnswerPart.LATER, [0.0] * 214)
        stated = controller.statement("shifted", both)
        assert (stated.part, stated.status, stated.audits) == ("first", RiskStatus.CALIBRATED, 50)
        assert controller.statement("shifted").part == "whole"

    def test_a_first_token_that_breaches_waits_from_then_on(self, controller):
        """A stricter share would be computed after it, too: it would be as far off as before."""
        assert self.feed(controller, AnswerPart.FIRST, [1.0] * 3) == [RiskEvent.TIGHTENED]
        assert AFTER[controller.notch("shifted")] == "50 % before"
        assert controller.statement("shifted").status is RiskStatus.BREACHED
        assert self.feed(controller, AnswerPart.WHOLE, [1.0] * 20) == [RiskEvent.SWITCHED_OFF]

    @pytest.mark.parametrize("part", [AnswerPart.LATER, AnswerPart.WHOLE])
    def test_other_parts_go_one_notch_back(self, controller, part):
        assert self.feed(controller, part, [1.0] * 3) == [RiskEvent.TIGHTENED]
        assert AFTER[controller.notch("shifted")] == "50 %"

    def test_where_nothing_is_recomputed_a_first_token_has_but_one_remedy(self):
        controller = RiskController(RiskTarget("first_token", EPSILON, DELTA, ("full", "none"), num_waiting=1), start=1)
        assert self.feed(controller, AnswerPart.FIRST, [1.0] * 3) == [RiskEvent.SWITCHED_OFF]

    def test_a_breach_of_one_part_leaves_no_evidence_of_the_others(self, controller):
        self.feed(controller, AnswerPart.LATER, [0.0] * 300)
        while controller.notch("shifted") == 3:
            self.feed(controller, AnswerPart.FIRST, [1.0])
        found = controller.statements()["shifted"]
        assert set(found) == {"whole"}
        assert found["whole"].audits == 0


class TestNotches:
    def test_before_the_first_token_each_notch_mends_all_of_an_answer(self):
        found = notches_of(QuerySeam(0.1), RepairTime.BEFORE)
        assert [notch.name for notch in found] == ["full", "50 %", "25 %", "10 %", "5 %", "none"]
        assert {notch.repair for notch in found} == {RepairTime.BEFORE}

    @pytest.mark.parametrize("policy", [QuerySeam(0.1), FirstK(16), NoRecompute()])
    def test_after_it_one_more_lets_it_wait(self, policy):
        """Of the notches that wait all come before the others, and the last one has the policy of the next."""
        found = notches_of(policy, RepairTime.AFTER)
        waiting = [notch for notch in found if notch.repair is RepairTime.BEFORE]
        assert found[: len(waiting)] == tuple(waiting)
        if len(found) > 2:
            assert [notch.name for notch in waiting] == ["full", f"{found[2].name} before"]
            assert waiting[1].policy == found[2].policy
        assert len(found) == len({notch.name for notch in found})
        assert found[-1].repair is RepairTime.AFTER
