"""plan_graft: spans only where they pay, the last token and everything unmatched computed, a reason for every miss."""

from __future__ import annotations

import dataclasses

import pytest

from kvgraft.donors import CostModel, plan_graft
from kvgraft.errors import ConfigError
from kvgraft.types import Fidelity, GraftPlan, Match, Miss, MissReason

FREE = CostModel(copy_per_token=0, per_span=0)


def make_match(start, length, donor_start=0, donor_id=7):
    return Match(start, donor_id, donor_start, length)


def plan(num_tokens, prefix_len, *matches, cost_model=None, min_run=16):
    return plan_graft(num_tokens, prefix_len, list(matches), cost_model, min_run=min_run)


def reason(*args, **kwargs):
    miss = plan(*args, **kwargs)
    assert isinstance(miss, Miss)
    assert miss.detail
    return miss.reason


def test_spans_and_computed_positions_are_a_partition_behind_the_prefix():
    planned = plan(200, 30, make_match(50, 40, 5), make_match(100, 60, 1))
    assert isinstance(planned, GraftPlan)
    assert planned.spans == (make_match(50, 40, 5), make_match(100, 60, 1))
    assert planned.compute.tolist() == [*range(30, 50), *range(90, 100), *range(160, 200)]
    assert planned.compute.dtype == "int64"
    assert planned.reused_len == 100


def test_last_token_is_cut_off_a_span_and_computed():
    planned = plan(100, 0, make_match(0, 100, 3))
    assert planned.spans == (make_match(0, 99, 3),)
    assert planned.compute.tolist() == [99]


def test_shortest_match_at_the_very_end_is_used_without_its_last_token():
    assert plan(100, 0, make_match(84, 16)).spans == (make_match(84, 15),)


def test_exact_prefix_is_cut_off_a_span():
    assert plan(200, 60, make_match(40, 80, 10)).spans == (make_match(60, 60, 30),)


def test_span_that_the_prefix_leaves_too_little_of_is_not_reused():
    assert reason(200, 60, make_match(40, 30)) is MissReason.NOT_WORTH_IT


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((100, 0), MissReason.NO_MATCH),
        ((100, 99, make_match(0, 100)), MissReason.COVERED_BY_PREFIX),
        ((100, 100), MissReason.COVERED_BY_PREFIX),
        ((100, 50, make_match(0, 50)), MissReason.COVERED_BY_PREFIX),
        ((1, 0), MissReason.COVERED_BY_PREFIX),
        ((0, 0), MissReason.COVERED_BY_PREFIX),
        ((100, 0, make_match(10, 15)), MissReason.NOT_WORTH_IT),
    ],
)
def test_miss_names_its_reason(args, expected):
    assert reason(*args) is expected


def test_min_run_is_the_shortest_span():
    matches = (make_match(0, 31), make_match(40, 32))
    assert plan(100, 0, *matches, min_run=32).spans == matches[1:]


def test_span_is_kept_only_where_it_saves_more_than_it_costs():
    costs = CostModel(compute_per_token=1, attention_per_key=0, copy_per_token=0.25, per_span=10, recompute_ratio=0.25)
    assert costs.saving(0, 20) == 0
    assert reason(100, 0, make_match(0, 20), cost_model=costs) is MissReason.NOT_WORTH_IT
    assert plan(100, 0, make_match(0, 21), cost_model=costs).spans == (make_match(0, 21),)


def test_exact_spans_pay_for_no_recomputation_and_no_look():
    costs = CostModel(1, 0, 0, 0, recompute_ratio=0.5, query_rows=64)
    exact, shifted = dataclasses.replace(make_match(0, 40), fidelity=Fidelity.EXACT), make_match(0, 40)
    assert (costs.saving(0, 40, is_shifted=False), costs.saving(0, 40)) == (40, 20)
    assert plan(200, 0, exact, cost_model=costs).spans == (exact,)
    assert reason(200, 0, shifted, cost_model=costs) is MissReason.NOT_WORTH_IT
    planned = plan(200, 10, exact, dataclasses.replace(shifted, target_start=100))
    assert [(span.target_start, span.length, span.is_exact) for span in planned.spans] == [
        (10, 30, True),
        (100, 40, False),
    ]
    assert (planned.settled_end, planned.has_shifted) == (40, True)
    assert not plan(200, 10, exact).has_shifted


def test_attention_makes_late_positions_worth_more():
    costs = CostModel(attention_per_key=1e-3, per_span=30)
    assert costs.saving(0, 20) < 0 < costs.saving(20_000, 20_020)
    assert costs.compute_cost(0, 3) == pytest.approx(3 + 1e-3 * (1 + 2 + 3))


def test_recomputing_everything_is_never_worth_it():
    costs = dataclasses.replace(FREE, recompute_ratio=1.0)
    assert reason(1_000, 0, make_match(0, 900), cost_model=costs) is MissReason.NOT_WORTH_IT


def test_default_costs_keep_the_shortest_run():
    assert isinstance(plan(100, 0, make_match(0, 16)), GraftPlan)


@pytest.mark.parametrize("values", [{"per_span": -1}, {"recompute_ratio": 1.5}, {"copy_per_token": float("nan")}])
def test_cost_model_refuses_impossible_values(values):
    with pytest.raises(ConfigError, match=next(iter(values))):
        CostModel(**values)


@pytest.mark.parametrize(
    "args",
    [
        (100, 101),
        (100, -1),
        (100, 0, make_match(50, 51)),
        (100, 0, make_match(50, 20), make_match(10, 20)),
        (100, 0, make_match(0, 20), make_match(19, 20)),
        (100, 0, make_match(0, 0)),
    ],
)
def test_contradicting_arguments_are_refused(args):
    with pytest.raises(ConfigError):
        plan(*args)


def test_group_that_does_not_touch_the_prefix_must_pay_for_its_phase():
    costs = CostModel(attention_per_key=0, copy_per_token=0, per_span=0, per_phase=50, recompute_ratio=0)
    near, small, big = make_match(30, 20), make_match(80, 40), make_match(150, 60)
    assert plan(300, 30, near, small, big, cost_model=costs).spans == (near, big)


def test_adjacent_spans_share_a_phase():
    costs = CostModel(attention_per_key=0, copy_per_token=0, per_span=0, per_phase=50, recompute_ratio=0)
    first, second = make_match(80, 40), make_match(120, 20, donor_id=9)
    assert plan(300, 30, first, second, cost_model=costs).spans == (first, second)
    assert reason(300, 30, first, make_match(130, 20), cost_model=costs) is MissReason.NOT_WORTH_IT


class TestQueryRowsRunTwice:
    """An engine that computes everything in one pass runs the last computed rows again behind what it has chosen."""

    COSTS = CostModel(attention_per_key=0, copy_per_token=0, per_span=0, recompute_ratio=0.1, query_rows=64)

    def test_a_graft_must_save_more_than_the_rows_cost(self):
        assert reason(2000, 1800, make_match(1850, 71), cost_model=self.COSTS) is MissReason.NOT_WORTH_IT
        assert isinstance(plan(2000, 1800, make_match(1850, 72), cost_model=self.COSTS), GraftPlan)  # 64.8 saved

    def test_no_more_rows_are_run_than_are_computed(self):
        assert isinstance(plan(60, 0, make_match(0, 50), cost_model=self.COSTS), GraftPlan)  # 45 saved, 10 run twice
        assert reason(100, 0, make_match(0, 50), cost_model=self.COSTS) is MissReason.NOT_WORTH_IT

    def test_small_grafts_pay_for_the_rows_together(self):
        matches = make_match(100, 40), make_match(200, 40, donor_id=8)
        planned = plan(400, 0, *matches, cost_model=self.COSTS)
        assert isinstance(planned, GraftPlan)
        assert planned.spans == matches


class TestReading:
    """K/V that have to be read from somewhere first cost that, too."""

    def test_a_match_is_taken_only_if_reading_it_beats_computing_it(self):
        costs = dataclasses.replace(FREE, attention_per_key=0, recompute_ratio=0)
        slow = make_match(0, 50, donor_id=1)
        at_hand = make_match(60, 50, donor_id=2)
        for cost, spans in ((49.0, (slow, at_hand)), (51.0, (at_hand,)), (float("inf"), (at_hand,))):
            planned = plan_graft(
                200, 0, [slow, at_hand], costs, read_cost=lambda match, cost=cost: cost if match.donor_id == 1 else 0.0
            )
            assert planned.spans == spans

    def test_the_cost_is_asked_of_what_is_left_of_a_match(self):
        asked = []

        def read_cost(match):
            asked.append(match)
            return 0.0

        planned = plan_graft(100, 30, [make_match(10, 90, 5)], FREE, read_cost=read_cost)
        assert tuple(asked) == planned.spans == (make_match(30, 69, 25),)

    def test_what_no_read_brings_is_not_worth_it(self):
        miss = plan_graft(200, 0, [make_match(0, 100)], FREE, read_cost=lambda _: float("inf"))
        assert miss.reason is MissReason.NOT_WORTH_IT

    def test_reading_counts_against_a_phase_and_a_look(self):
        costs = dataclasses.replace(FREE, attention_per_key=0, recompute_ratio=0, per_phase=60)
        match = make_match(20, 100)
        assert plan_graft(200, 0, [match], costs, read_cost=lambda _: 30.0).spans == (match,)
        assert isinstance(plan_graft(200, 0, [match], costs, read_cost=lambda _: 50.0), Miss)
        costs = dataclasses.replace(FREE, attention_per_key=0, recompute_ratio=0, query_rows=80)
        assert plan_graft(200, 0, [match], costs, read_cost=lambda _: 10.0).spans == (match,)
        assert isinstance(plan_graft(200, 0, [match], costs, read_cost=lambda _: 30.0), Miss)


class TestLook:
    """Choosing by what the question attends to costs its rows once more, where anything is to be chosen."""

    COSTS = dataclasses.replace(FREE, attention_per_key=0, recompute_ratio=0.1, query_rows=50)

    @pytest.mark.parametrize(("length", "is_made"), [(56, True), (55, False)])
    def test_a_graft_saves_more_than_its_look(self, length, is_made):
        """0.9 of the length is saved, and 50 is what the look takes."""
        made = plan_graft(2_000, 1_000, [make_match(1_200, length)], self.COSTS, min_run=16)
        assert isinstance(made, GraftPlan) == is_made
        if not is_made:
            assert made.reason is MissReason.NOT_WORTH_IT

    @pytest.mark.parametrize("fidelity", [Fidelity.EXACT, Fidelity.CONTINUED])
    def test_text_in_its_own_place_needs_no_look_and_no_repair(self, fidelity):
        match = dataclasses.replace(make_match(1_200, 16), fidelity=fidelity)
        planned = plan_graft(2_000, 1_000, [match], self.COSTS, min_run=16)
        assert planned.spans == (match,)
        assert self.COSTS.look_cost(planned) == 0
