"""Times of an answer's tokens, by hand and of a request."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.bench.timed_answer import TimedAnswer, timed_answer
from kvgraft.engine import LLM, SamplingParams
from kvgraft.types import ReuseMode


def test_gaps_between_tokens():
    answer = TimedAnswer(None, (1.0, 3.0, 3.5, 3.75, 4.75))
    assert (answer.ttft_s, answer.second_gap_s, answer.later_gap_s, answer.total_s) == (1.0, 2.0, 0.5, 4.75)


@pytest.mark.parametrize(("times", "gap"), [((2.0,), 0.0), ((2.0, 2.5), 0.5)])
def test_short_answers_have_no_later_gap(times, gap):
    answer = TimedAnswer(None, times)
    assert (answer.second_gap_s, answer.later_gap_s, answer.total_s) == (gap, 0.0, times[-1])


@pytest.mark.slow
def test_every_token_of_a_request_has_a_time():
    llm = LLM("graft-tiny", num_slots=500)
    prompt = np.arange(5, 105)
    answer = timed_answer(llm, prompt, SamplingParams(6, ignore_eos=True), ReuseMode.OFF)
    assert len(answer.times_s) == len(answer.output.token_ids) == 6
    assert list(answer.times_s) == sorted(answer.times_s)
    assert len(answer.cpu_times_s) == 6
    assert list(answer.cpu_times_s) == sorted(answer.cpu_times_s)
    assert answer.report.num_tokens == 100
