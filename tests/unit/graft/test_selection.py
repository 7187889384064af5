"""Selection policies and the rows that a sparse prefill runs for them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.bench.fidelity.oracle import Oracle
from kvgraft.errors import ConfigError
from kvgraft.graft.model import SequenceOutput
from kvgraft.graft.select import (
    Adaptive,
    FirstK,
    KVDeviation,
    NoRecompute,
    Observable,
    Observation,
    QueryAttention,
    QuerySeam,
    RandomShare,
    Recompute,
    SelectionContext,
    SelectionPolicy,
    selection_policy,
)
from kvgraft.graft.select.adaptive import jensen_shannon
from kvgraft.graft.select.context import selection_context
from kvgraft.graft.select.draw import drawn
from kvgraft.graft.sparse_prefill import SparsePrefill
from kvgraft.graft.steps import QUERY_ROWS, GraftSteps
from kvgraft.types import DonorId, GraftPlan, Match


def make_plan(num_tokens=100, prefix_len=4, spans=((10, 1, 0, 30), (50, 2, 5, 40))):
    matches = tuple(Match(start, DonorId(donor), donor_start, length) for start, donor, donor_start, length in spans)
    compute = np.ones(num_tokens, bool)
    compute[:prefix_len] = False
    for match in matches:
        compute[match.target_start : match.target_end] = False
    compute[-1] = True
    return GraftPlan(num_tokens, prefix_len, matches, np.flatnonzero(compute))


def run_prefill(plan, policy, mass=None, max_rows=1_000):
    """Drive a prefill with made-up outputs; returns the rows of each forward pass and the outcome."""
    prefill = SparsePrefill(np.arange(plan.num_tokens), np.arange(plan.num_tokens), GraftSteps(plan, policy))
    passes, outcome = [], None
    while outcome is None:
        rows = prefill.next_rows(max_rows)
        assert rows.positions.tolist() == prefill.remaining[:max_rows].tolist()
        passes.append(rows)
        seen = None
        if rows.observed_rows:
            full = np.zeros(plan.num_tokens, np.float32) if mass is None else mass
            seen = torch.from_numpy(full[: rows.positions[-1] + 1])
        outcome = prefill.receive(SequenceOutput(torch.full((rows.num_logits, 3), float(len(passes))), seen))
    return passes, outcome


def test_context_measures_the_distance_from_each_seam():
    context = selection_context(make_plan())
    assert context.reused.tolist() == [*range(10, 40), *range(50, 90)]
    assert context.seam_distance.tolist() == [*range(30), *range(40)]


def test_context_joins_spans_that_continue_one_another():
    joined = selection_context(make_plan(spans=((10, 1, 0, 30), (40, 1, 30, 20))))
    assert joined.seam_distance.tolist() == list(range(50))
    apart = selection_context(make_plan(spans=((10, 1, 0, 30), (40, 1, 31, 20))))
    assert apart.seam_distance.tolist() == [*range(30), *range(20)]


def test_context_leaves_out_the_last_token_which_is_computed_anyway():
    plan = make_plan(spans=((60, 1, 0, 40),))
    assert selection_context(plan).reused.tolist() == list(range(60, 99))


def test_none_runs_the_live_rows_once():
    plan = make_plan()
    passes, outcome = run_prefill(plan, NoRecompute())
    assert [rows.positions.tolist() for rows in passes] == [plan.compute.tolist()]
    assert outcome.work.recomputed_runs == ()
    assert outcome.logits.tolist() == [1.0] * 3


def test_first_k_adds_the_head_of_each_run():
    plan = make_plan()
    passes, outcome = run_prefill(plan, FirstK(2))
    assert passes[0].positions.tolist() == sorted([*plan.compute.tolist(), 10, 11, 50, 51])
    assert outcome.work.recomputed_runs == ((10, 2), (50, 2))


def test_query_seam_takes_attention_over_distance_and_reruns_what_is_behind():
    plan = make_plan()
    mass = np.ones(100, np.float32)
    mass[30], mass[55] = 1_000.0, 2_000.0
    passes, outcome = run_prefill(plan, QuerySeam(3 / 70), mass)
    looking, computing = passes
    assert looking.positions.tolist() == plan.compute.tolist()
    assert looking.observed_rows == len(plan.compute)
    # 55: 2000 / 6, 30: 1000 / 21, then the heads of the runs at 1 / 1 each, of which one is taken.
    chosen = sorted(set(outcome.work.computed.tolist()) - set(plan.compute.tolist()))
    assert len(chosen) == 3
    assert {30, 55} < set(chosen)
    assert chosen[0] == 10 or chosen == [30, 50, 55]
    assert computing.positions.tolist() == [
        p for p in outcome.work.computed.tolist() if p >= chosen[0]
    ]  # few live rows: all query
    assert outcome.logits.tolist() == [2.0] * 3


def test_query_seam_with_ratio_1_computes_everything_in_one_pass():
    passes, outcome = run_prefill(make_plan(), QuerySeam(1.0))
    assert len(passes) == 1
    assert outcome.work.computed.tolist() == list(range(4, 100))


def test_new_passages_in_front_of_the_query_are_not_run_twice():
    plan = make_plan(num_tokens=400, spans=((10, 1, 0, 30),))
    looking, computing = run_prefill(plan, QuerySeam(0.1))[0]
    assert looking.positions.tolist() == plan.compute.tolist()
    assert computing.positions.tolist() == [*computing.positions[:3].tolist(), *range(400 - QUERY_ROWS, 400)]


def test_only_the_last_live_rows_are_the_query():
    plan = make_plan(num_tokens=400, spans=((10, 1, 0, 30),))
    passes, _ = run_prefill(plan, QuerySeam(0.1))
    assert passes[0].observed_rows == QUERY_ROWS


def test_long_prefills_run_in_pieces_that_observe_the_same_rows():
    plan = make_plan(num_tokens=400, spans=((10, 1, 0, 30),))
    passes, outcome = run_prefill(plan, QuerySeam(0.1), max_rows=50)
    assert max(len(rows.positions) for rows in passes) == 50
    looking = [rows for rows in passes if rows.observed_rows]
    assert sum(rows.observed_rows for rows in looking) == QUERY_ROWS
    assert [rows.num_logits for rows in passes].count(1) == 2
    assert len(outcome.work.computed) == len(plan.compute) + 3


class Nested(SelectionPolicy):
    """Doubles its choice twice, as adaptive budgets do."""

    name = "nested"
    observes = frozenset({Observable.QUERY_ATTENTION})
    recompute_ratio = 0.1

    def steps(self, context):
        for count in (4, 8):
            observation = yield Recompute(context.reused[-count:], observe_query=True)
            assert observation.attention_mass is not None
        yield Recompute(context.reused[:0])


def test_nested_policies_add_to_earlier_steps_and_may_end_without_work():
    plan = make_plan()
    passes, outcome = run_prefill(plan, Nested())
    assert len(passes) == 2
    assert passes[1].positions.tolist() == [*range(82, 86), *range(90, 100)]
    assert outcome.work.recomputed_runs == ((82, 8),)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("nonsense", {}, "did you mean 'none'"),
        ("first_k", {"k": 0}, "k >= 1"),
        ("query_seam", {"ratio": 0.0}, "ratio"),
        ("query_seam", {"k": 3}, "unexpected"),
    ],
)
def test_bad_policy_is_refused(name, parameters, message):
    with pytest.raises(ConfigError, match=message):
        selection_policy(name, **parameters)


def test_policies_state_their_name_and_share():
    assert isinstance(SelectionContext(1, np.arange(1), np.arange(1), np.arange(1)), SelectionContext)
    assert [selection_policy(n).name for n in ("none", "first_k", "query_seam")] == ["none", "first_k", "query_seam"]
    assert [selection_policy(n).recompute_ratio for n in ("none", "first_k", "query_seam")] == [0.0, 16 / 256, 0.1]


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_kv_deviation_takes_the_tokens_whose_keys_changed_most(rng, ratio):
    context = selection_context(make_plan())
    deviation = rng.random(context.num_tokens).astype(np.float32)
    steps = KVDeviation(ratio).steps(context)
    step = next(steps)
    if ratio < 1:
        assert step.observe_key_deviation
        assert not len(step.positions)
        step = steps.send(Observation(None, None, deviation))
    budget = round(ratio * len(context.reused))
    best = context.reused[np.argsort(deviation[context.reused])[-budget:]]
    assert step.positions.tolist() == sorted(best)
    with pytest.raises(StopIteration):
        steps.send(Observation(None, None))


@st.composite
def contexts(draw):
    """Runs with gaps behind an exact prefix."""
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=5))
    position, prefix_len, reused, distance = draw(st.integers(0, 9)), 0, [], []
    prefix_len = position
    for length in lengths:
        position += draw(st.integers(0, 4))
        reused.extend(range(position, position + length))
        distance.extend(range(length))
        position += length
    num_tokens = position + draw(st.integers(1, 5))
    live = np.setdiff1d(np.arange(prefix_len, num_tokens), reused)
    return SelectionContext(num_tokens, np.array(reused), np.array(distance), live, draw(st.integers(0, 2**32 - 1)))


def steps_of(policy, context, mass=None, deviation=None):
    """Every step of a policy that is shown `mass` and `deviation`."""
    steps, found = policy.steps(context), []
    observation = None
    while True:
        try:
            found.append(next(steps) if observation is None else steps.send(observation))
        except StopIteration:
            return found
        observation = Observation(torch.zeros(3), mass, deviation)


def ranked(context, score, ratio):
    """The oracle: the best tokens one by one, of equal ones those in front."""
    budget = math.ceil(ratio * len(context.reused))
    order = sorted(range(len(context.reused)), key=lambda index: (-float(score[index]), index))
    return sorted(int(context.reused[index]) for index in order[:budget])


@given(context=contexts(), ratio=st.sampled_from([0.01, 0.1, 0.5, 0.9, 1.0]), seed=st.integers(0, 99))
@settings(max_examples=80)
def test_rankings_take_the_best_of_what_is_reused(context, ratio, seed):
    shown = np.random.default_rng(seed).integers(0, 9, context.num_tokens).astype(np.float32)
    score = shown[context.reused]
    expected = ranked(context, score, ratio)
    near_seams = ranked(context, score / (1.0 + context.seam_distance), ratio)
    assert steps_of(QueryAttention(ratio), context, mass=shown)[-1].positions.tolist() == expected
    assert steps_of(QuerySeam(ratio), context, mass=shown)[-1].positions.tolist() == near_seams
    assert steps_of(KVDeviation(ratio), context, deviation=shown)[-1].positions.tolist() == expected
    deviation = np.arange(context.num_tokens) % 5 + 1.0
    truly = ranked(context, score * deviation[context.reused], ratio)
    assert steps_of(Oracle(ratio, deviation=deviation), context, mass=shown)[-1].positions.tolist() == truly


@given(
    context=contexts(), ratio=st.floats(0.01, 1), share=st.floats(0, 1), draw=st.sampled_from(["random", "attention"])
)
@settings(max_examples=80)
def test_drawn_tokens_are_part_of_the_budget_and_alone_the_sample(context, ratio, share, draw):
    mass = np.random.default_rng(0).random(context.num_tokens).astype(np.float32)
    budget = math.ceil(ratio * len(context.reused))
    last = steps_of(QuerySeam(ratio, share, draw), context, mass=mass)[-1]
    assert len(last.positions) == len(set(last.positions.tolist())) == budget
    assert set(last.sample.tolist()) <= set(last.positions.tolist()) <= set(context.reused.tolist())
    if budget == len(context.reused):
        return
    num_drawn = round(share * budget)
    assert len(last.sample) == (num_drawn or budget)
    others = np.setdiff1d(last.positions, last.sample)
    left = np.setdiff1d(context.reused, last.sample)
    score = dict(
        zip(context.reused.tolist(), (mass[context.reused] / (1.0 + context.seam_distance)).tolist(), strict=True)
    )
    if len(others) and len(others) < len(left):
        worst = min(score[p] for p in others.tolist())
        assert worst >= max(score[p] for p in left.tolist() if p not in set(others.tolist()))


def test_only_unbiased_choices_may_estimate_drift():
    context = selection_context(make_plan(), np.arange(100))
    shown = np.random.default_rng(0).random(100).astype(np.float32)
    policies = (
        RandomShare(0.2),
        QueryAttention(0.2),
        QuerySeam(0.2),
        FirstK(4),
        KVDeviation(0.2),
        Oracle(0.2, deviation=shown),
    )
    counts = {policy.name: len(steps_of(policy, context, shown, shown)[-1].sample) for policy in policies}
    assert counts == {
        "random": 14,
        "query_attention": 14,
        "query_seam": 14,
        "first_k": 8,
        "kv_deviation": 0,
        "oracle": 0,
    }


def test_draws_depend_on_the_prompt_alone():
    plan, tokens = make_plan(), np.arange(100)
    first = steps_of(RandomShare(0.2), selection_context(plan, tokens))[0].positions
    assert first.tolist() == steps_of(RandomShare(0.2), selection_context(plan, tokens.copy()))[0].positions.tolist()
    assert (
        first.tolist()
        == steps_of(RandomShare(0.2), selection_context(plan, tokens.astype(np.int32)))[0].positions.tolist()
    )
    tokens[3] += 1
    assert first.tolist() != steps_of(RandomShare(0.2), selection_context(plan, tokens))[0].positions.tolist()


def test_draws_are_even_or_in_proportion_to_weights():
    reused = np.arange(10, 30)
    weight = np.arange(20.0)
    even, weighted = np.zeros(20), np.zeros(20)
    for seed in range(4_000):
        context = SelectionContext(40, reused, np.arange(20), np.arange(10), seed)
        even[drawn(context, 5)] += 1
        weighted[drawn(context, 1, weight)] += 1
    assert abs(even / 4_000 - 0.25).max() < 0.035  # five standard deviations
    assert abs(weighted / 4_000 - weight / weight.sum()).max() < 0.025
    assert weighted[0] == 0


def sharp(token, size=5, height=20.0):
    logits = torch.zeros(size)
    logits[token] = height
    return logits


def run_adaptive(policy, context, answers):
    """Number of reused tokens of each step; the engine answers with `answers`, of which the first is the look's."""
    steps = policy.steps(context)
    step, sizes = next(steps), []
    mass = np.random.default_rng(0).random(context.num_tokens).astype(np.float32)
    for answer in answers:
        sizes.append(-1 if step.afresh else len(step.positions))
        try:
            step = steps.send(Observation(answer, mass if step.observe_query else None))
        except StopIteration:
            return sizes
    raise AssertionError("it wants more")


@pytest.mark.parametrize(
    ("answers", "sizes"),
    [
        ([0, 1, 1], [0, 7, 14]),  # the look's answer is not compared: it recomputed nothing
        ([0, 1, 2, 2], [0, 7, 14, 28]),
        ([0, 1, 2, 3, 0], [0, 7, 14, 28, -1]),
    ],
)
def test_adaptive_doubles_until_two_answers_agree_or_gives_up(answers, sizes):
    context = selection_context(make_plan())
    assert run_adaptive(Adaptive(0.1, 1e-3, 0.4), context, [sharp(token) for token in answers]) == sizes


def test_adaptive_budgets_are_nested_and_giving_up_is_a_full_prefill():
    class Changing:
        """Another first token in every pass."""

        num = 0

    plan, mass = make_plan(num_tokens=400, spans=((10, 1, 0, 300),)), np.random.default_rng(1).random(400)
    prefill = SparsePrefill(np.arange(400), np.arange(400), GraftSteps(plan, Adaptive(0.05, 1e-6, 0.2)))
    passes, outcome = [], None
    while outcome is None:
        rows = prefill.next_rows(1_000)
        passes.append(rows.positions)
        Changing.num += 1
        seen = torch.from_numpy(mass[: rows.positions[-1] + 1]) if rows.observed_rows else None
        outcome = prefill.receive(SequenceOutput(sharp(Changing.num % 5)[None], seen))
    reused = set(range(10, 310))
    computed = [set(rows.tolist()) & reused for rows in passes]
    assert [len(new) for new in computed] == [0, 15, 15, 30, 300]
    assert not computed[1] & computed[2]
    assert passes[-1].tolist() == list(range(4, 400))
    assert sum(length for _, length in outcome.work.recomputed_runs) == 300
    assert len(outcome.work.rows) == sum(len(rows) for rows in passes)


@given(seed=st.integers(0, 2**31), size=st.integers(2, 20))
@settings(max_examples=50)
def test_jensen_shannon_is_symmetric_bounded_and_that_of_scipy(seed, size):
    distance = pytest.importorskip("scipy.spatial.distance")
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(size, 0.3)), rng.dirichlet(np.full(size, 0.3))
    p[0] = 0.0
    p /= p.sum()
    assert jensen_shannon(p, q) == pytest.approx(jensen_shannon(q, p))
    assert -1e-12 <= jensen_shannon(p, q) <= math.log(2) + 1e-12
    assert jensen_shannon(p, q) == pytest.approx(distance.jensenshannon(p, q) ** 2, abs=1e-9)
    assert jensen_shannon(p, p) == 0.0


def assert_ranking_is_by_prompt_position(prefix_len):
    """Of a prompt behind an exact prefix the token is chosen that the query looks at."""
    plan = make_plan(prefix_len=prefix_len)
    mass = np.zeros(100, np.float32)
    mass[[33, 71]] = 1.0
    for policy in (QueryAttention(2 / 70), QuerySeam(2 / 70)):
        outcome = run_prefill(plan, policy, mass)[1]
        assert np.setdiff1d(outcome.work.computed, plan.compute).tolist() == [33, 71]


def test_ranking_is_by_prompt_position_whatever_the_prefix(monkeypatch):
    """And the test would notice one that counts from the end of the prefix."""
    for prefix_len in (0, 4, 9):
        assert_ranking_is_by_prompt_position(prefix_len)

    def off_by_the_prefix(self, context, observation):
        return observation.attention_mass[context.reused - int(context.live[0])]

    monkeypatch.setattr(QueryAttention, "_score", off_by_the_prefix)
    with pytest.raises(AssertionError):
        assert_ranking_is_by_prompt_position(9)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (lambda: QuerySeam(0.1, 1.5), "sample_share"),
        (lambda: QueryAttention(0.1, 0.5, "chance"), "'random' or 'attention'"),
        (lambda: KVDeviation(0.1, 0), "layer >= 1"),
        (lambda: Adaptive(0.5, 0.1, 0.4), "ratio <= give_up"),
        (lambda: Adaptive(0.1, 0.0), "tau > 0"),
        (lambda: steps_of(Oracle(0.1), selection_context(make_plan()), mass=np.ones(999)), "oracle knows 0 tokens"),
    ],
)
def test_parameters_out_of_range_are_refused_in_one_line(policy, message):
    with pytest.raises(ConfigError, match=message) as error:
        policy()
    assert "\n" not in str(error.value)
