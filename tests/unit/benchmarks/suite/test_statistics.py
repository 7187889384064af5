"""Figures of rows: what they are of few requests and of none, and their intervals."""

from __future__ import annotations

import math

import pytest
from benchmarks.suite.statistics import (
    mean,
    median,
    percentile,
    ratio_of_perplexities,
    ratio_of_sums,
    with_interval,
)


def test_a_ratio_is_of_all_time_and_lies_in_its_interval():
    found = with_interval("speedup", ratio_of_sums, [[10.0, 10.0, 80.0], [5.0, 10.0, 10.0]], seed=0)
    assert found["speedup"] == 100 / 25
    assert 1 <= found["speedup_low"] < found["speedup"] < found["speedup_high"] <= 8
    assert found == with_interval("speedup", ratio_of_sums, [[10.0, 10.0, 80.0], [5.0, 10.0, 10.0]], seed=0)


def test_one_request_has_no_interval_and_none_has_nothing():
    assert with_interval("x", ratio_of_sums, [[3.0], [2.0]], 0) == {"x": 1.5, "x_low": None, "x_high": None}
    assert with_interval("x", ratio_of_sums, [[], []], 0) == {"x": None, "x_low": None, "x_high": None}
    assert mean([]) is median([]) is percentile([], 95) is None


def test_perplexities_are_compared_by_their_geometric_mean():
    nll, reference = [math.log(2), math.log(8)], [math.log(1), math.log(1)]
    assert with_interval("ratio", ratio_of_perplexities, [nll, reference], 0)["ratio"] == pytest.approx(4)
