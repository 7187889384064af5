"""Copied text that the prompt says before the copy gets a larger share, and the first token waits for it."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.engine import LLM, SamplingParams
from kvgraft.graft.select import QueryAttention, QuerySeam, RandomShare, expected_rows, says_much_twice
from kvgraft.graft.select.context import selection_context
from kvgraft.graft.select.repeats import MOST_COUNTED, REPEAT_WEIGHT, repeated
from kvgraft.reuse.repair_time import REPEATS
from kvgraft.types import DonorId, GraftPlan, Match, RepairTime

RUN = 16


def simply_repeated(token_ids, shifted):
    """Every run of 16 tokens of a span, looked for in all of the prompt that stands before the span."""
    found = [False] * len(token_ids)
    for start, length in shifted:
        before = {tuple(token_ids[at : at + RUN]) for at in range(start - RUN + 1)}
        for at in range(start, start + length - RUN + 1):
            if tuple(token_ids[at : at + RUN]) in before:
                found[at : at + RUN] = [True] * RUN
    return found


@st.composite
def prompts(draw):
    """Token ids made of a few pieces, some of them several times, and disjoint extents in it."""
    pieces = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=4))
    order = draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=8))
    token_ids = [token for index in order for token in pieces[index]]
    edges = sorted(draw(st.sets(st.integers(0, len(token_ids)), max_size=6)))
    return token_ids, [(start, stop - start) for start, stop in zip(edges[::2], edges[1::2], strict=False)]


@given(prompts())
def test_repeats_are_those_of_a_simple_search(prompt):
    token_ids, shifted = prompt
    found = repeated(np.array(token_ids), shifted)
    assert found.tolist() == simply_repeated(token_ids, shifted)


def text(seed, length):
    return np.random.default_rng(seed).integers(0, 1000, length)


def plan_of(length, start, count):
    return GraftPlan.over(length, 0, [Match(start, DonorId(1), 0, count)])


def test_what_a_span_repeats_within_itself_is_no_repeat():
    quoted = text(1, 40)
    token_ids = np.concatenate([text(2, 60), quoted, quoted])
    assert not repeated(token_ids, [(60, 80)]).any()
    assert repeated(token_ids, [(100, 40)]).sum() == 40


@pytest.mark.parametrize("policy", [QuerySeam(0.1), QueryAttention(0.1), RandomShare(0.1)], ids=lambda each: each.name)
def test_a_repeated_token_counts_as_several(policy):
    quoted = text(1, 100)
    once, twice = np.concatenate([text(2, 200), quoted]), np.concatenate([quoted, text(2, 100), quoted])
    plan = plan_of(300, 200, 99)
    more = (REPEAT_WEIGHT - 1) * MOST_COUNTED / 10
    for token_ids, count, repeats in ((once, 10, range(0)), (twice, ceil(9.9 + more), range(200, 299))):
        context = selection_context(plan, token_ids)
        assert context.repeats.tolist() == list(repeats)
        assert policy.budget(context) == expected_rows(policy, context) == count


def test_no_more_is_chosen_than_is_reused():
    quoted = text(1, 100)
    context = selection_context(plan_of(200, 100, 99), np.concatenate([quoted, quoted]))
    policy = QuerySeam(0.8)
    assert 0.8 * context.num_counted > 99
    assert policy.budget(context) == expected_rows(policy, context) == 99


def test_a_quarter_is_much():
    quoted = text(1, 40)
    prompt = np.concatenate([quoted, text(2, 60), quoted, text(3, 200)])
    assert says_much_twice(prompt, [(100, 160)])
    assert not says_much_twice(prompt, [(100, 161)])
    assert not says_much_twice(prompt, [])


def answered(llm, *, twice):
    """The report of a prompt that has a document of before; with `twice`, which says it a second time."""
    document, other = text(1, 200), text(2, 200)
    llm.reset()
    llm.generate(np.concatenate([text(3, 20), document]), SamplingParams(1), "exact")
    prompt = np.concatenate([text(3, 20), document if twice else other, text(4, 9), document, text(5, 9)])
    (output,) = llm.generate(prompt, SamplingParams(4, ignore_eos=True), repair="after")
    return output.report


def test_the_first_token_waits_for_a_larger_repair():
    llm = LLM("graft-tiny", num_slots=2000, heal="off", repair_below_margin=0)
    once, twice = (answered(llm, twice=each) for each in (False, True))
    assert once.repair.time is RepairTime.AFTER
    assert (twice.repair.time, twice.repair.reason) == (RepairTime.BEFORE, REPEATS)
    assert once.recomputed_tokens == pytest.approx(20, abs=1)
    assert twice.recomputed_tokens == pytest.approx(20 + (REPEAT_WEIGHT - 1) * MOST_COUNTED / 10, abs=2)
