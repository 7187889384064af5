"""Reports and counts of requests that end in the step of their graft: vLLM asks for the report before workers have told."""

from __future__ import annotations

import pytest
from stand_ins import Engine, Request
from test_graft_scheduler import DOCUMENTS, assert_nothing_is_left, fails_once, make_graft, served

from kvgraft.integrations.vllm.messages import WorkerReport
from kvgraft.integrations.vllm.scheduler.counts import Counts
from kvgraft.reuse.attempt import Attempt
from kvgraft.reuse.outcome import GraftOutcome

HEAD = 30
PROMPT = list(range(5000, 5000 + HEAD)) + DOCUMENTS[0] + [7000, 7001]
MADE = GraftOutcome(((HEAD, 8), (HEAD + 40, 4)), 2.0, 3.0, corrected_tokens=58)


GAUGES = {"donors": 0, "donor_tokens": 0, "host_bytes": 0, "host_limit_bytes": 0, "is_refused": False}


def knows_the_document(load):
    engine = Engine(make_graft(load))
    engine.add(Request("donor", DOCUMENTS[0] + [1, 2], {"kvgraft": "exact"}, 1))
    engine.step(room=True, chunk=400)
    engine.step(room=True, chunk=400)
    engine.graft.counts.take(**GAUGES)
    return engine


@pytest.fixture(params=["sync", "async"])
def engine(request):
    return knows_the_document(request.param)


def outcome_of_the_next_graft(engine, outcome):
    """Have workers tell this outcome of every graft."""
    report = engine.workers.report

    def told():
        made = report()
        return WorkerReport(dict.fromkeys(made.outcomes, outcome), made.lost_texts, made.lost_donors, store=made.store)

    engine.workers.report = told
    engine._check_reports = engine.told.clear  # the books of the stand-in know nothing of tokens computed again


def ended(engine, max_tokens):
    """What the client of one request got, once vLLM has sent it, and what was counted."""
    sent = []
    finish = engine.graft.finish
    engine.graft.finish = lambda request: sent.append(finish(request)) or sent[-1]
    engine.add(Request("one", PROMPT, None, max_tokens))
    while not sent:
        engine.step(room=True, chunk=400)
    return sent[0]["kvgraft"], engine.graft.counts.take(**GAUGES)


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_what_was_computed_again_and_corrected_is_told(engine, max_tokens):
    outcome_of_the_next_graft(engine, MADE)
    report, counts = ended(engine, max_tokens)
    assert (report["shifted_tokens"], report["recomputed_tokens"], report["corrected_tokens"]) == (58, 12, 58)
    assert report["timings_ms"]["recompute"] == 3.0
    assert counts["prompt_tokens/recomputed/approx"] == 12
    assert counts["grafted_requests"] == 1
    assert counts["recompute_seconds"] == [0.003]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_graft_that_fell_back_is_a_miss(engine, max_tokens):
    engine.fate = "falls back"
    report, counts = ended(engine, max_tokens)
    assert (report["shifted_tokens"], report["spans"]) == (0, [])
    assert report["miss"] == {"reason": "error", "detail": "a donor is gone"}
    assert (counts["graft_misses/error"], counts["graft_errors"]) == (1, 1)
    assert "grafted_requests" not in counts


def test_a_request_that_ends_while_it_waits_was_not_grafted():
    engine = knows_the_document("async")
    waiting = Request("one", PROMPT, None, 4)
    engine.add(waiting)
    engine.fate = "slow"
    engine.step(room=True, chunk=400)
    assert waiting.waits
    report = engine.graft.finish(waiting)["kvgraft"]
    assert (report["shifted_tokens"], report["miss"]["reason"]) == (0, "deadline")
    assert "grafted_requests" not in engine.graft.counts.take(**GAUGES)


def test_a_late_outcome_of_an_earlier_attempt_takes_no_promise_back():
    """vLLM waits for the load that it was promised since; a request that began again once more is not grafted."""
    engine = knows_the_document("async")
    graft, request = engine.graft, Request("one", PROMPT, None, 4)
    promised = graft.match(request, 0)
    graft.admit(request, ([1, 2, 3],), promised[0])
    assert promised[0] > 0
    assert graft.match(request, 0) == promised, "vLLM has begun it again"
    graft.receive(WorkerReport({"one": GraftOutcome((), 1.0, 1.0, fell_back="a donor is gone", failed=True)}))
    assert graft.match(request, 0) == promised
    assert graft.registry.catalogue.is_pinned(next(iter(graft.registry.catalogue)).donor_id)
    graft.admit(request, ([1, 2, 3],), promised[0])
    assert graft.match(request, 0) == (0, False), "a graft of it has failed"
    assert graft.finish(request)["kvgraft"]["shifted_tokens"] == promised[0] - HEAD, "of the worst attempt"
    graft.check()


@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(("owner", "name"), [(Attempt, "report"), (Counts, "request")], ids=["written", "counted"])
def test_a_report_that_fails_costs_nothing_but_itself(load, owner, name, monkeypatch):
    """The answer is complete by then; memory may be short for a moment."""
    engine = served(load)
    monkeypatch.setattr(owner, name, fails_once(getattr(owner, name)))
    for number in range(2):
        engine.add(Request(str(number), [*range(5000, 5040 + number)] + DOCUMENTS[0] + [7000] * 40, None, 4))
    assert_nothing_is_left(engine)
    assert engine.graft.counts.num_errors == 1
