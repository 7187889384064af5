"""The pace of streams on a simulated machine: seconds = fixed + per stream + prefill operations / speed."""

from __future__ import annotations

import math

import pytest

from kvgraft.engine.schedule.pace import Pace

FLOPS_PER_TOKEN = 1e7


def simulate(pace, *, seconds, num_streams, waiting_flops=math.inf, speed=1e11, lateness=0.0, stall_every=0):
    """Run steps for `seconds`; returns steps done, prefill operations done and the largest step."""
    clock = done = longest = 0.0
    steps = 0
    while clock < seconds:
        budget = pace.prefill_flops(num_streams, lateness)
        prefill = min(budget, waiting_flops - done)
        took = 0.004 + 0.0005 * num_streams + prefill / speed
        if stall_every and steps % stall_every == 0:
            took += 0.1
        pace.observe(took, num_streams, prefill)
        clock += took
        done += prefill
        steps += 1
        longest = max(longest, took)
    return steps, done, longest


@pytest.mark.parametrize("slowdown", [0.1, 0.2, 1.0])
@pytest.mark.parametrize("num_streams", [1, 8, 32])
def test_streams_get_slower_by_the_slowdown_and_no_more(slowdown, num_streams):
    plain = 0.004 + 0.0005 * num_streams
    steps, done, longest = simulate(Pace(slowdown, 0.25, FLOPS_PER_TOKEN), seconds=20, num_streams=num_streams)
    assert 20 / steps == pytest.approx(plain * (1 + slowdown), rel=0.05)
    assert done == pytest.approx(1e11 * 20 * slowdown / (1 + slowdown), rel=0.1)
    assert longest < plain + max(plain * slowdown, 0.0015) * 1.6 + 0.01


def test_without_streams_prefill_is_bounded_by_the_longest_step():
    pace = Pace(0.2, 0.25, FLOPS_PER_TOKEN)
    _, done, longest = simulate(pace, seconds=20, num_streams=0)
    assert longest < 0.27
    assert done / 20 > 0.95e11


def test_offline_prefill_is_not_bounded():
    assert Pace(0.2, math.inf, FLOPS_PER_TOKEN).prefill_flops(0, 0.0) == math.inf


def test_late_prompts_get_more():
    on_time = simulate(Pace(0.2, 0.25, FLOPS_PER_TOKEN), seconds=10, num_streams=8, lateness=1.0)[1]
    late = simulate(Pace(0.2, 0.25, FLOPS_PER_TOKEN), seconds=10, num_streams=8, lateness=40.0)[1]
    assert late > 2.5 * on_time


def test_streams_run_half_as_fast_at_least_however_late_prompts_are():
    plain = 0.004 + 0.0005 * 8
    steps, done, longest = simulate(Pace(0.2, 0.25, FLOPS_PER_TOKEN), seconds=10, num_streams=8, lateness=1e6)
    assert 10 / steps == pytest.approx(2 * plain, rel=0.05)
    assert longest < 2.5 * plain
    assert done > 0.45 * 10 * 1e11


def test_stalls_of_the_machine_do_not_starve_prompts():
    calm = simulate(Pace(0.2, 0.25, FLOPS_PER_TOKEN), seconds=20, num_streams=8)
    noisy = simulate(Pace(0.2, 0.25, FLOPS_PER_TOKEN), seconds=20, num_streams=8, stall_every=100)
    assert noisy[1] / noisy[0] > 0.6 * calm[1] / calm[0]


def test_lateness_is_waiting_over_what_the_share_promises():
    pace = Pace(0.25, 0.25, FLOPS_PER_TOKEN)
    assert pace.lateness(5.0, 1e9) == 0.0  # nothing is known yet
    simulate(pace, seconds=1, num_streams=0)
    assert pace.lateness(1.0, 2e10) == pytest.approx(1.0, rel=0.1)  # 0.2 s of work at a fifth of the machine


@pytest.mark.parametrize("held_s", [1.0, 10.0, 3600.0])
def test_a_process_that_was_held_still_goes_on_as_before(held_s):
    """SIGSTOP in the middle of a piece, or a lid that was closed."""
    pace = Pace(0.2, 0.25, FLOPS_PER_TOKEN)
    simulate(pace, seconds=5, num_streams=0)
    before = pace.prefill_flops_alone
    pace.observe(held_s, 0, before / 5)
    assert pace.prefill_flops_alone > 0.9 * before
    pace.observe(held_s, 0, before)
    assert pace.prefill_flops_alone > 0.6 * before


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0, 10.0])
def test_a_machine_of_another_speed_is_learned(factor):
    pace = Pace(0.2, 0.25, FLOPS_PER_TOKEN)
    simulate(pace, seconds=5, num_streams=0)
    simulate(pace, seconds=30, num_streams=0, speed=factor * 1e11)
    assert pace.flops_per_s == pytest.approx(factor * 1e11, rel=0.15)


def test_an_admission_costs_credit_and_says_nothing_about_speed():
    pace, plain = Pace(0.2, 0.25, FLOPS_PER_TOKEN), 0.0045
    simulate(pace, seconds=2, num_streams=1)
    speed = pace.flops_beside(1.0)
    pace.observe(plain + 0.020, 1, 0.0, admission_s=0.020)
    assert pace.stream_step_s(1) == pytest.approx(plain)
    assert pace.prefill_flops(1, 0.0) == 0.0, "it is paid for by steps without prefill"
    pace.observe(plain + 0.010 + 0.020, 1, 0.010 * speed, admission_s=0.020)
    assert pace.flops_beside(1.0) == pytest.approx(speed, rel=1e-3)
