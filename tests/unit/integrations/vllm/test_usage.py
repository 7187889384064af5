"""Tokens that a graft computes, all if it came to nothing, do not count as cached; a reset that gives it up is no error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from stand_ins import Request
from test_graft_scheduler import DOCUMENTS, assert_nothing_is_left, served

PROMPT = [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40
PROMISED = 40 + len(DOCUMENTS[0])


def counted(engine, request):
    """vLLM's counts of a request, which it writes with every answer to its lookup while none was preempted."""
    stats = SimpleNamespace(num_external_cached_tokens=0, num_cached_tokens=0, num_computed_tokens=0)
    request.prefill_stats, request.num_preemptions = stats, 0
    match = engine.graft.match

    def matched(asked, cached_len):
        external, waits = match(asked, cached_len)
        if asked is request and external is not None:
            stats.num_external_cached_tokens, stats.num_cached_tokens = external, cached_len + external
            stats.num_computed_tokens = len(PROMPT) - cached_len - external
        return external, waits

    engine.graft.match = matched
    return stats


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize("max_tokens", [1, 4])
@pytest.mark.parametrize("fate", ["fails", "falls back", ""])
def test_tokens_of_a_graft_that_was_computed_do_not_count_as_cached(load, fate, max_tokens):
    engine = served(load)
    request = Request("one", PROMPT, None, max_tokens)
    stats = counted(engine, request)
    engine.add(request)
    engine.fate = fate
    engine.step(room=True, chunk=400)
    engine.fate = ""
    assert_nothing_is_left(engine)
    cached = 0 if fate else len(DOCUMENTS[0])  # the gap before it is computed
    assert (stats.num_external_cached_tokens, stats.num_cached_tokens) == (cached, cached)
    assert stats.num_computed_tokens == len(PROMPT) - cached


def test_counts_of_a_request_that_was_preempted_before_are_left_alone():
    """vLLM reports its first prefill."""
    engine = served("sync")
    request = Request("one", PROMPT, None, 4)
    stats = counted(engine, request)
    request.num_preemptions = 1
    engine.add(request)
    engine.fate = "fails"
    engine.step(room=True, chunk=400)
    assert stats.num_external_cached_tokens == PROMISED


@pytest.mark.parametrize("is_admitted", [True, False])
def test_a_reset_under_a_graft_is_no_error(is_admitted):
    engine = served("async")
    reports, finish = {}, engine.graft.finish
    engine.graft.finish = lambda request: reports.setdefault(request.request_id, finish(request))
    engine.add(Request("one", PROMPT, None, 4))
    engine.fate = "slow"
    engine.defers = not is_admitted  # vLLM hands its blocks over in the step after the lookup
    engine.step(room=True, chunk=400)
    engine.fate, engine.defers = "", False
    engine.graft.reset(prefixes_are_gone=False)
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 0
    assert reports["one"]["kvgraft"]["miss"]["reason"] == "no_donors"
