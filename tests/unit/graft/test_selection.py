"""Selection policies and the rows that a sparse prefill runs for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import ConfigError
from kvgraft.graft.model import SequenceOutput
from kvgraft.graft.select import (
    FirstK,
    KVDeviation,
    NoRecompute,
    Observation,
    QuerySeam,
    Recompute,
    SelectionContext,
    SelectionPolicy,
    selection_policy,
)
from kvgraft.graft.sparse_prefill import QUERY_ROWS, SparsePrefill, selection_context
from kvgraft.types import DonorId, GraftPlan, Match


def make_plan(num_tokens=100, exact_len=4, spans=((10, 1, 0, 30), (50, 2, 5, 40))):
    matches = tuple(Match(start, DonorId(donor), donor_start, length) for start, donor, donor_start, length in spans)
    compute = np.ones(num_tokens, bool)
    compute[:exact_len] = False
    for match in matches:
        compute[match.target_start : match.target_end] = False
    compute[-1] = True
    return GraftPlan(num_tokens, exact_len, matches, np.flatnonzero(compute))


def run_prefill(plan, policy, mass=None, max_rows=1_000):
    """Drive a prefill with made-up outputs; returns the rows of each forward pass and the outcome."""
    prefill = SparsePrefill(np.arange(plan.num_tokens), plan, np.arange(plan.num_tokens), policy)
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
    assert outcome.recomputed(plan) == 0
    assert outcome.logits.tolist() == [1.0] * 3


def test_first_k_adds_the_head_of_each_run():
    plan = make_plan()
    passes, outcome = run_prefill(plan, FirstK(2))
    assert passes[0].positions.tolist() == sorted([*plan.compute.tolist(), 10, 11, 50, 51])
    assert outcome.recomputed(plan) == 4


def test_query_seam_takes_attention_over_distance_and_reruns_what_is_behind():
    plan = make_plan()
    mass = np.ones(100, np.float32)
    mass[30], mass[55] = 1_000.0, 2_000.0
    passes, outcome = run_prefill(plan, QuerySeam(3 / 70), mass)
    looking, computing = passes
    assert looking.positions.tolist() == plan.compute.tolist()
    assert looking.observed_rows == len(plan.compute)
    # 55: 2000 / 6, 30: 1000 / 21, then the heads of the runs at 1 / 1 each, of which one is taken.
    chosen = sorted(set(outcome.computed.tolist()) - set(plan.compute.tolist()))
    assert len(chosen) == 3
    assert {30, 55} < set(chosen)
    assert chosen[0] == 10 or chosen == [30, 50, 55]
    assert computing.positions.tolist() == [
        p for p in outcome.computed.tolist() if p >= chosen[0]
    ]  # few live rows: all query
    assert outcome.logits.tolist() == [2.0] * 3


def test_query_seam_with_ratio_1_computes_everything_in_one_pass():
    passes, outcome = run_prefill(make_plan(), QuerySeam(1.0))
    assert len(passes) == 1
    assert outcome.computed.tolist() == list(range(4, 100))


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
    assert len(outcome.computed) == len(plan.compute) + 3


class Nested(SelectionPolicy):
    """Doubles its choice twice, as adaptive budgets do."""

    name = "nested"
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
    assert outcome.recomputed(plan) == 8


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("nonsense", {}, "none, random, first_k"),
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
    assert [selection_policy(n).recompute_ratio for n in ("none", "first_k", "query_seam")] == [0.0, 16 / 256, 0.05]


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
