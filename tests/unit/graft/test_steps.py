"""The policy-step loop by itself, against an oracle of sets: no engine, no forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.errors import PolicyError
from kvgraft.graft.drift import DriftCorrection
from kvgraft.graft.drift_estimate import MeanShift
from kvgraft.graft.select import FirstK, NoRecompute, Observable, Observation, Recompute, SelectionPolicy
from kvgraft.graft.select.context import selection_context
from kvgraft.graft.steps import QUERY_ROWS, GraftSteps, Scope
from kvgraft.types import DonorId, Fidelity, GraftPlan, Match

CORRECTION = DriftCorrection(MeanShift())
NOTHING_SEEN = Observation(None, None)


@dataclass
class Scripted(SelectionPolicy):
    """Takes steps that were written down before, then ends or raises."""

    script: list[Recompute]
    fails: bool = False

    name = "scripted"
    recompute_ratio = 0.1
    observes = frozenset(Observable)

    def steps(self, context):
        yield from (step for step in self.script)  # a generator, which takes observations
        if self.fails:
            raise ValueError("no further step")


@st.composite
def plans(draw):
    """An exact prefix, spans of which the first ones may be exact, gaps, and new text at the end."""
    position = prefix_len = draw(st.integers(0, 6))
    spans, may_be_exact = [], True
    for donor in range(draw(st.integers(1, 4))):
        gap = draw(st.sampled_from([0, 0, 1, 9, 70]))
        position += gap
        may_be_exact = may_be_exact and not gap and draw(st.booleans())
        length = draw(st.integers(1, 40))
        spans.append(
            Match(position, DonorId(donor), 0, length, fidelity=Fidelity.EXACT if may_be_exact else Fidelity.SHIFTED)
        )
        position += length
    return GraftPlan.over(position + draw(st.integers(1, 80)), prefix_len, spans)


@st.composite
def scopes(draw, plan):
    """The three ways of engines: the whole prompt; up to the last copy; the same with the gaps computed before."""
    end = plan.spans[-1].target_end
    return draw(st.sampled_from([Scope(), Scope(end=end), Scope(end=end, is_forgetful=True), Scope(end, plan.compute)]))


@st.composite
def scripts(draw, plan):
    reused = selection_context(plan).reused
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["positions"] * 4 + ["look", "afresh"]))
        share, drawn = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])), np.random.default_rng(draw(st.integers(0, 99)))
        chosen = np.flatnonzero(drawn.random(len(reused)) < share)
        sample = chosen[:: draw(st.integers(1, 3))]
        steps.append(
            Recompute(
                reused[chosen],
                observe_query=draw(st.booleans()),
                observe_key_deviation=kind == "look",
                sample=reused[sample],
                afresh=kind == "afresh",
            )
        )
    steps.append(Recompute(reused[:0]))  # a look may not be the last
    return steps


class Oracle:
    """The rows of steps and what they leave, position by position."""

    def __init__(self, plan, scope):
        self.plan = plan
        self.end = plan.num_tokens if scope.end is None else scope.end
        self.is_forgetful = scope.is_forgetful
        self.live = set(plan.compute.tolist())
        self.reused = set(selection_context(plan).reused.tolist())
        self.given = set(scope.computed.tolist())
        self.computed, self.corrected = set(self.given), set()

    def rows(self, step):
        if step.afresh:
            copied = [p for p in range(self.plan.prefix_len, self.end) if p not in self.given]
            return list(range(min(copied, default=self.end - 1), self.end))
        if step.observe_key_deviation:
            return list(range(min(self.plan.settled_end, self.end - 1), self.end))
        wanted = set(step.positions.tolist()) | {p for p in self.live if p < self.end}
        new = wanted - self.computed
        if not new:
            return []
        again = self.computed if self.is_forgetful else sorted(self.live)[-QUERY_ROWS:]
        return sorted(new | {p for p in again if self.is_forgetful or min(new) < p < self.end})

    def run(self, step):
        if step.observe_key_deviation and not step.afresh:
            return
        rows = set(self.rows(step))
        context = selection_context(self.plan)
        for run in np.split(context.reused, context.run_starts[1:]):
            sample = (set(step.sample.tolist()) & rows & set(run.tolist())) - self.computed
            rest = set(run.tolist()) - rows - self.computed
            if len(sample) >= CORRECTION.estimator.least_sample:
                self.corrected |= rest
        self.computed |= rows


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_rows_and_masks_are_those_of_the_oracle(data):
    plan = data.draw(plans())
    scope, script = data.draw(scopes(plan)), data.draw(scripts(plan))
    steps, oracle = GraftSteps(plan, Scripted(script), correction=CORRECTION, scope=scope), Oracle(plan, scope)
    planned, num_rows = steps.first(), 0
    for step in script:
        assert planned.rows.tolist() == oracle.rows(step)
        assert planned.observe_query == step.observe_query
        steps.ran(planned)
        oracle.run(step)
        num_rows += 0 if planned.deviation_layer else len(planned.rows)
        work = steps.work()
        assert set(work.computed.tolist()) == oracle.computed
        again = [p for start, length in work.recomputed_runs for p in range(start, start + length)]
        assert again == sorted(oracle.computed & oracle.reused)
        assert work.num_corrected == len(oracle.corrected - oracle.computed)
        assert len(work.rows) == num_rows
        planned = steps.next(NOTHING_SEEN)
    assert planned is None


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_a_policy_that_fails_at_any_step_leaves_nothing_of_what_was_copied(data):
    plan = data.draw(plans())
    scope, script = data.draw(scopes(plan)), data.draw(scripts(plan))
    steps = GraftSteps(plan, Scripted(script, fails=True), correction=CORRECTION, scope=scope)
    planned = steps.first()
    for _ in script[1:]:
        steps.ran(planned)
        planned = steps.next(NOTHING_SEEN)
    steps.ran(planned)
    with pytest.raises(PolicyError, match="no further step"):
        steps.next(NOTHING_SEEN)
    planned = steps.give_up()
    steps.ran(planned)
    copied = {p for span in plan.spans for p in range(span.target_start, span.target_end)}
    end = plan.num_tokens if scope.end is None else scope.end
    assert planned.rows.tolist() == list(range(int(planned.rows[0]), end))
    assert {p for p in copied if p < end} <= set(planned.rows.tolist())
    assert not len(scope.computed) or int(planned.rows[0]) == plan.spans[0].target_start
    work = steps.work()
    assert (work.recomputed_runs, work.num_corrected) == ((), 0)
    assert steps.next(NOTHING_SEEN) is None


def test_giving_up_before_the_first_step_computes_everything_after_the_exact_prefix():
    plan = GraftPlan.over(100, 4, [Match(10, DonorId(1), 0, 60)])
    steps = GraftSteps(plan, FirstK(8))
    assert steps.give_up().rows.tolist() == list(range(4, 100))
    assert steps.next(NOTHING_SEEN) is None


def test_rows_that_no_policy_asked_for_continue_where_its_steps_ended():
    plan = GraftPlan.over(300, 0, [Match(0, DonorId(1), 5, 200)])
    steps = GraftSteps(plan, FirstK(8), correction=CORRECTION)
    steps.ran(steps.first())
    assert steps.next(NOTHING_SEEN) is None
    repaired = []
    for first in range(0, 200, 50):
        chosen = np.arange(first, first + 50)
        planned = steps.plan_pass(Recompute(chosen, sample=chosen))
        steps.ran(planned)
        repaired += [p for p in planned.rows.tolist() if p < 200]
    assert repaired == list(range(8, 200))
    work = steps.work()
    assert work.computed.tolist() == list(range(300))
    assert (work.recomputed_runs, work.num_corrected) == (((0, 200),), 0)


def test_exact_copies_that_a_full_prefill_computes_too_are_not_counted_as_computed_again():
    spans = [Match(4, DonorId(1), 4, 16, fidelity=Fidelity.EXACT), Match(30, DonorId(2), 0, 60)]
    steps = GraftSteps(GraftPlan.over(100, 4, spans), Scripted([Recompute(np.empty(0, np.int64), afresh=True)]))
    planned = steps.first()
    assert planned.rows.tolist() == list(range(4, 100))
    steps.ran(planned)
    assert steps.work().recomputed_runs == ((30, 60),)


def test_what_is_planned_counts_only_once_it_ran():
    plan = GraftPlan.over(100, 4, [Match(10, DonorId(1), 0, 60)])
    steps = GraftSteps(plan, NoRecompute())
    first = steps.first()
    assert steps.work().computed.tolist() == []
    assert steps.plan_pass(Recompute(np.arange(0))).rows.tolist() == first.rows.tolist()
    steps.ran(first)
    assert steps.work().computed.tolist() == plan.compute.tolist()


def test_the_query_is_the_last_live_rows():
    plan = GraftPlan.over(400, 0, [Match(10, DonorId(1), 0, 30)])
    query = GraftSteps(plan, NoRecompute(), scope=Scope(end=40)).query
    assert query.tolist() == list(range(400 - QUERY_ROWS, 400))


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_an_answer_before_the_repair_runs_the_live_rows_and_leaves_what_the_policy_leaves_otherwise(data):
    """Whatever the policy does later, over a tail that the engine computes itself or not."""
    plan = data.draw(plans())
    scope = data.draw(st.sampled_from([Scope(), Scope(end=plan.spans[-1].target_end)]))
    script = data.draw(scripts(plan))
    steps = GraftSteps(plan, Scripted(script), correction=CORRECTION, scope=scope)
    answer = steps.answer()
    end = plan.num_tokens if scope.end is None else scope.end
    assert answer.rows.tolist() == [p for p in plan.compute.tolist() if p < end]
    is_look = not len(script[0].positions) and not script[0].observe_key_deviation and not script[0].afresh
    assert answer.observe_query == (is_look and script[0].observe_query)
    steps.ran(answer)
    assert steps.work().recomputed_runs == ()
    oracle = Oracle(plan, Scope())
    oracle.computed |= oracle.live
    is_seen = data.draw(st.booleans())
    seen = Observation(None, np.zeros(plan.num_tokens, np.float32) if is_seen else None)
    planned = steps.repair(seen)
    if answer.observe_query and not is_seen:
        assert planned.observe_query
        assert planned.rows.tolist() == plan.compute[-QUERY_ROWS:].tolist()
        steps.ran(planned)
        planned = steps.next(NOTHING_SEEN)
    for step in script[1:] if is_look else script:
        assert planned.rows.tolist() == oracle.rows(step)
        steps.ran(planned)
        oracle.run(step)
        planned = steps.next(NOTHING_SEEN)
    assert planned is None
    work = steps.work()
    assert set(work.computed.tolist()) == oracle.computed
    again = [p for start, length in work.recomputed_runs for p in range(start, start + length)]
    assert again == sorted(oracle.computed & oracle.reused)


def test_giving_up_after_the_answer_computes_everything_that_was_copied():
    plan = GraftPlan.over(100, 4, [Match(10, DonorId(1), 0, 60)])
    steps = GraftSteps(plan, Scripted([Recompute(np.empty(0, np.int64))], fails=True), scope=Scope(end=70))
    steps.ran(steps.answer())
    with pytest.raises(PolicyError):
        steps.repair(NOTHING_SEEN)
    planned = steps.give_up()
    assert planned.rows.tolist() == list(range(4, 100))
    steps.ran(planned)
    assert steps.is_given_up
    assert steps.work().recomputed_runs == ()
