"""Figures of a run and what counts as sustained, on exchanges whose figures are known."""

from __future__ import annotations

import dataclasses

import pytest

from kvgraft.bench.arrivals import Load
from kvgraft.bench.client import TimedRequest
from kvgraft.bench.load import LoadResult
from kvgraft.bench.rates import RateSearch, default_slo_ms, sustained_rates
from kvgraft.bench.summary import kept_up, percentiles, summarise


def exchange(at, ttft=0.1, tpot=0.01, tokens=11, **changes):
    moments = [at + ttft + i * tpot for i in range(tokens)]
    return dataclasses.replace(TimedRequest(at, at, moments, moments[-1], None, 100, tokens, 60), **changes)


def summary(exchanges, *, planned=None, gave_up=None, seconds=10.0, mode="off", rate=2.0, warm_up=()):
    result = LoadResult(tuple(exchanges), len(exchanges) if planned is None else planned, seconds, gave_up)
    return summarise(mode, Load(rate=rate), result, seconds, warm_up)


def test_percentiles_of_known_values():
    figures = percentiles(range(101))
    assert figures == {"mean": 50, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert percentiles([7.0])["p99"] == 7
    assert percentiles([]) == {}


def test_figures_of_a_run():
    run = summary([exchange(float(i), ttft=0.1 * (i + 1)) for i in range(5)])
    assert run.ttft_ms["p50"] == pytest.approx(300)
    assert run.tpot_ms["p95"] == pytest.approx(10)
    assert run.end_to_end_ms["p50"] == pytest.approx(400)
    assert (run.requests_per_s, run.tokens_per_s) == pytest.approx((0.5, 5.5))
    assert (run.prompt_tokens, run.reused_share) == (500, pytest.approx(0.6))
    assert (run.sent, run.completed, run.unfinished, run.failures) == (5, 5, 0, {})


def test_ttft_counts_from_the_scheduled_time_and_lag_is_told():
    run = summary([exchange(1.0, sent_s=1.25)])
    assert run.ttft_ms["p50"] == pytest.approx(100)
    assert run.client_lag_ms["p99"] == pytest.approx(250)


def test_time_per_token_needs_two_tokens():
    assert summary([exchange(0.0, tokens=1)]).tpot_ms == {}


def test_failures_are_counted_by_kind_and_leave_the_times_alone():
    bad = [exchange(0.0, failure="http 503", token_s=[]), exchange(1.0, failure="http 503"), exchange(2.0, failure="x")]
    run = summary([exchange(3.0), *bad], warm_up=[exchange(0.0, failure="y")])
    assert run.failures == {"http 503": 2, "x": 1, "y in warm-up": 1}
    assert run.completed == 1
    assert not run.stable
    assert run.tpot_ms["p50"] == pytest.approx(10)


def test_unfinished_requests_count_with_their_wait():
    waiting = exchange(2.0, token_s=[], ended_s=None)
    run = summary([exchange(0.0), waiting], planned=9, gave_up="too slow")
    assert (run.sent, run.completed, run.unfinished, run.planned) == (2, 1, 1, 9)
    assert run.ttft_ms["p99"] > 7_000
    assert not run.stable


def test_run_without_any_answer_has_no_times():
    run = summary([exchange(0.0, failure="http 500", token_s=[])])
    assert run.ttft_ms == run.tpot_ms == run.end_to_end_ms == {}
    assert not run.sustains(1e9)


@pytest.mark.parametrize(("growth", "share"), [(0.0, 1.0), (0.25, 0.8), (1.0, 0.5), (-0.5, 1.0)])
def test_growing_times_mean_that_the_server_does_not_keep_up(growth, share):
    assert kept_up([(t, 20 + growth * t) for t in range(40)]) == pytest.approx(share)


def test_a_batch_that_fills_at_the_start_is_not_a_growing_queue():
    assert kept_up([(t, min(t, 3)) for t in range(40)]) > 0.98


def test_times_that_vary_from_request_to_request_are_not_a_growing_queue():
    assert kept_up([(t, 5.0 if t % 7 else 1.0) for t in range(100)]) > 0.98


def test_too_few_requests_show_no_growth():
    assert kept_up([(0.0, 0.0), (1.0, 9.0)]) == kept_up([]) == 1
    assert kept_up([(0.0, float(i)) for i in range(20)]) == 1


def at_rate(mode, rate, ttft=0.1, growth=0.0, **changes):
    return summary([exchange(i / rate, ttft + growth * i / rate) for i in range(40)], mode=mode, rate=rate, **changes)


def test_sustained_is_stable_and_in_time():
    good, slow = at_rate("off", 4.0), at_rate("off", 4.0, ttft=0.3)
    assert good.sustains(101)
    assert not slow.sustains(101)
    assert slow.stable
    growing = at_rate("off", 4.0, growth=0.1)
    assert not growing.stable
    assert not growing.sustains(1e9)
    assert growing.ttft_ms["p95"] > 1_000
    assert not at_rate("off", 4.0, gave_up="x").stable
    assert not at_rate("off", 4.0, planned=41).stable


def test_a_run_of_20_times_the_limit_needs_no_estimate_of_growth():
    noisy = dataclasses.replace(at_rate("off", 4.0), arrival_s=10.0, kept_up=0.8)
    assert noisy.sustains(499)
    assert not noisy.sustains(501)
    assert not noisy.sustains(50)


def test_default_limit_is_what_off_shows_at_its_highest_stable_rate():
    runs = [at_rate("off", 1.0), at_rate("off", 2.0, ttft=0.2), at_rate("off", 4.0, growth=0.2), at_rate("graft", 8.0)]
    assert default_slo_ms(runs) == pytest.approx(200)
    assert default_slo_ms(runs[2:]) is None


def test_highest_sustained_rates_and_their_ratios():
    runs = [at_rate("off", 1.0), at_rate("graft", 1.0), at_rate("off", 2.0, ttft=2.0), at_rate("graft", 4.0)]
    off, graft = sustained_rates(runs, 150.0)
    assert (off.mode, off.rate, off.ratio, off.at_least, off.irregular) == ("off", 1.0, 1.0, False, False)
    assert (graft.mode, graft.rate, graft.ratio, graft.at_least) == ("graft", 4.0, 4.0, True)
    assert graft.p95_ttft_ms == pytest.approx(100)


def test_nothing_sustained_and_holes():
    off, graft = sustained_rates(
        [at_rate("off", 1.0, ttft=9), at_rate("graft", 1.0, ttft=9), at_rate("graft", 2.0)], 150
    )
    assert (off.rate, off.p95_ttft_ms, off.ratio, off.at_least) == (0.0, None, None, False)
    assert (graft.rate, graft.ratio, graft.irregular, graft.at_least) == (2.0, None, True, True)


@pytest.mark.parametrize("truth", [0.3, 1.0, 5.3, 100.0])
def test_search_encloses_the_rate(truth):
    search, good, bad, runs = RateSearch(1.0, 30), 0.0, float("inf"), 0
    while (rate := search.next_rate) is not None:
        sustained = rate <= truth
        good, bad = (max(good, rate), bad) if sustained else (good, min(bad, rate))
        search.record(sustained=sustained)
        runs += 1
    assert good <= truth < bad <= 1.1 * good
    assert runs <= 13


@pytest.mark.parametrize("sustained", [True, False])
def test_search_without_an_end_is_bounded(sustained):
    search = RateSearch(1.0, 5)
    for _ in range(5):
        assert search.next_rate is not None
        search.record(sustained=sustained)
    assert search.next_rate is None
