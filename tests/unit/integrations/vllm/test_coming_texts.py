"""Requests about one text that nobody has computed yet: the first one computes it, and the others wait for that."""

from __future__ import annotations

import pytest
from stand_ins import Engine, Request
from test_graft_scheduler import DOCUMENTS, assert_nothing_is_left, make_graft

NEW = DOCUMENTS[0] + DOCUMENTS[1]
"""140 tokens; a step computes 40 of each request."""
CHUNK = 40


def about(number, text=NEW, *, head=20, tail=10, mode="graft"):
    tokens = [5000 + number] * head + text + [7000 + number] * tail
    return Request(f"r{number}", tokens, {"kvgraft": mode}, 3)


def reporting(load):
    """An engine that keeps what clients are sent."""
    engine = Engine(make_graft(load))
    engine.reports, finish = {}, engine.graft.finish
    engine.graft.finish = lambda request: engine.reports.setdefault(request.request_id, finish(request))
    return engine


@pytest.fixture
def engine():
    return reporting("sync")


def step(engine):
    engine.step(room=True, chunk=CHUNK)


def admitted(engine):
    return {request.request_id for request in engine.requests.values() if request not in engine.waiting}


def shifted(engine):
    return {name: report["kvgraft"]["shifted_tokens"] for name, report in engine.reports.items()}


@pytest.mark.parametrize("load", ["sync", "async"])
def test_the_first_of_many_computes_and_the_others_copy(load):
    engine = reporting(load)
    for number in range(5):
        engine.add(about(number))
    for _ in range(4):  # 170 tokens
        step(engine)
        assert admitted(engine) == {"r0"}
    for _ in range(2):
        step(engine)
    assert admitted(engine) == {"r0", "r1", "r2", "r3", "r4"}
    assert_nothing_is_left(engine)
    assert [shifted(engine)[f"r{n}"] for n in range(5)] == [0, *[len(NEW)] * 4]


@pytest.mark.parametrize(
    ("second", "waits"),
    [
        (about(1, head=0, tail=len(NEW)), True),
        (about(1, head=1, tail=len(NEW)), False),  # more than half of it is its own
        (about(1, mode="exact"), False),
        (about(1, mode="off"), False),
        (about(1, text=NEW[:14]), False),  # shorter than any run
    ],
    ids=["half", "less than half", "exact", "off", "short"],
)
def test_only_what_is_worth_it_is_waited_for(engine, second, waits):
    engine.add(about(0))
    step(engine)
    engine.add(second)
    step(engine)
    assert ("r1" not in admitted(engine)) is waits
    assert_nothing_is_left(engine)


def test_what_donors_have_is_not_waited_for(engine):
    engine.add(about(0))
    while engine.running or engine.waiting:
        step(engine)
    engine.add(about(1, head=30))
    step(engine)  # it goes through its own text after the copy
    engine.add(about(2))
    step(engine)
    assert "r2" in admitted(engine)
    assert_nothing_is_left(engine)
    assert shifted(engine)["r2"] == len(NEW)


def test_a_short_prompt_does_not_wait_for_a_long_one(engine):
    """While the long one is computed, the short one would be computed twice over."""
    engine.add(about(0, tail=3 * len(NEW)))
    step(engine)
    engine.add(about(1, head=0, tail=1))
    step(engine)
    assert "r1" in admitted(engine)
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("ends", ["aborted", "preempted", "reset"])
def test_others_go_on_where_the_first_one_does_not(engine, ends):
    engine.add(about(0))
    for number in (1, 2):
        engine.add(about(number))
    step(engine)
    assert admitted(engine) == {"r0"}
    first = engine.requests["r0"]
    if ends == "aborted":
        engine.end(first)
    elif ends == "preempted":
        engine.preempt(first)
    else:
        engine.epoch += 1
        engine.cache.clear()
        engine.graft.reset(prefixes_are_gone=True)
    for _ in range(3):
        step(engine)
    # What was preempted is computed again, and waited for.
    assert ("r1" in admitted(engine)) is (ends != "preempted")
    assert_nothing_is_left(engine)
    assert engine.requests.keys() <= engine.reports.keys()


def test_a_request_waits_once(engine):
    """Its texts come one after the other, of requests that come after it."""
    engine.add(about(0, text=DOCUMENTS[0], tail=1))
    engine.add(Request("both", DOCUMENTS[0] + DOCUMENTS[1][:50], None, 2))
    step(engine)
    assert "both" not in admitted(engine)
    while "both" not in admitted(engine):
        engine.add(about(10 + len(engine.requests), text=DOCUMENTS[1], tail=1))
        step(engine)
        assert len(engine.requests) < 8
    assert_nothing_is_left(engine)


def test_nothing_is_indexed_for_one_request(engine):
    coming = engine.graft._coming
    engine.add(about(0))
    step(engine)
    assert list(coming._coming) == ["r0"]
    assert not coming._indexed
    engine.add(about(1))
    step(engine)
    assert list(coming._indexed) == ["r0"]
    assert_nothing_is_left(engine)
    assert not coming._coming
    assert not coming._indexed
    assert not len(coming._catalogue)
    assert not coming._waits
