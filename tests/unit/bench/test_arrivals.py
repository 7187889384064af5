"""Arrival times: seeded, ascending, at the asked rate, with the recorded pattern."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.bench.arrivals import arrival_times


@pytest.mark.parametrize("recorded", [None, [3.0, 4.0, 9.0, 9.5, 20.0] * 20])
@pytest.mark.parametrize("rate", [0.25, 1.0, 16.0])
def test_times_begin_at_0_ascend_and_have_the_rate(recorded, rate):
    times = arrival_times(recorded, 100, rate, 0)
    assert times[0] == 0
    assert (np.diff(times) >= 0).all()
    assert (len(times) - 1) / times[-1] == pytest.approx(rate)


def test_recorded_pattern_is_kept_and_scaled():
    assert arrival_times([10.0, 11.0, 14.0, 99.0], 3, 1.0, 0).tolist() == pytest.approx([0, 0.5, 2.0])
    assert arrival_times([10.0, 11.0, 14.0, 99.0], 3, 4.0, 0).tolist() == pytest.approx([0, 0.125, 0.5])


def test_poisson_process_is_seeded_and_the_same_at_every_rate_only_faster():
    slow, fast = (arrival_times(None, 50, rate, 7) for rate in (1.0, 8.0))
    assert slow.tolist() == arrival_times(None, 50, 1.0, 7).tolist()
    assert slow == pytest.approx(8 * fast)
    assert slow.tolist() != arrival_times(None, 50, 1.0, 8).tolist()


def test_gaps_of_the_poisson_process_are_exponential():
    gaps = np.diff(arrival_times(None, 20_000, 2.0, 1))
    assert gaps.mean() == pytest.approx(0.5)
    assert gaps.std() == pytest.approx(0.5, rel=0.05)
    assert (gaps > 0.5).mean() == pytest.approx(np.exp(-1), abs=0.01)


def test_requests_recorded_at_one_moment_become_a_poisson_process():
    assert arrival_times([5.0] * 9, 9, 2.0, 3).tolist() == arrival_times(None, 9, 2.0, 3).tolist()


@pytest.mark.parametrize("recorded", [None, [4.0, 5.0]])
@pytest.mark.parametrize("count", [0, 1])
def test_few_requests(recorded, count):
    assert arrival_times(recorded, count, 2.0, 0).tolist() == [0.0] * count
