"""What is read before which request, and what an interrupted measurement does again. No model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from benchmarks.suite.walk import READ_FIRST, consecutive, drawn, pending_steps

from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.fidelity.suites import Suite
from kvgraft.bench.journal import Journal

SUBJECT = SimpleNamespace(fits=lambda prompt: "long" not in prompt)


def make_suite(count, keys=lambda number: (str(number),), text="prompt"):
    requests = [FidelityRequest(str(n), (Part(f"{text} {n}"),), keys(n), keys(n)[0], ()) for n in range(count)]
    return Suite("suite", tuple(requests))


class Log:
    """Stands for a model and an instrument, and keeps the order of things."""

    def __init__(self):
        self.events = []

    def reset(self):
        self.events.append("reset")

    def read(self, prompt):
        self.events.append(f"read {prompt}")


def walked(walk, journal, stop_after=None):
    """Everything that happens on a walk, measurements among it; stops behind some of them as a killed run does."""
    log = Log()
    for count, (_, step, read) in enumerate(pending_steps([walk], log, log, journal, lambda: None), 1):
        log.events.append(f"measure {step.index} behind {len(read)}")
        journal.add({"suite": walk.suite.name, "index": step.index})
        if count == stop_after:
            break
    return log.events


def test_consecutive_requests_are_read_one_behind_the_other():
    walk = consecutive(make_suite(40), SUBJECT, limit=2, seed=3)
    (block,) = walk.blocks
    first = block[0].index
    assert [step.index for step in block] == [first, first + 1]
    events = walked(walk, Journal(None, {}))
    before = [f"read prompt {first - READ_FIRST + n}" for n in range(READ_FIRST)]
    assert events == [
        "reset",
        *before,
        f"measure {first} behind {READ_FIRST}",
        f"read prompt {first}",
        f"measure {first + 1} behind {READ_FIRST + 1}",
        f"read prompt {first + 1}",
    ]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_few_requests_are_all_measured(count):
    walk = consecutive(make_suite(count), SUBJECT, limit=5, seed=0)
    assert [step.index for block in walk.blocks for step in block] == list(range(count))


def test_requests_that_do_not_fit_are_counted_and_left_out():
    walk = consecutive(make_suite(4, text="long"), SUBJECT, limit=2, seed=0)
    assert (walk.blocks, walk.too_long) == ((), 4)


def test_an_interrupted_walk_reads_again_what_was_read_and_measures_the_rest():
    walk = drawn(make_suite(6, keys=lambda n: ("a",)), SUBJECT, side="all", limit=3, seed=1).all_read()
    whole = walked(walk, Journal(None, {}))
    journal = Journal(None, {})
    walked(walk, journal, stop_after=2)
    rest = walked(walk, journal)
    assert [event for event in rest if event.startswith("measure")] == [whole[-2]]
    assert [event for event in rest if event.startswith("read")] == [each for each in whole if each.startswith("read")]
    assert walked(walk, journal) == ["reset"]


def test_out_of_time_nothing_further_is_yielded(monkeypatch):
    times = iter([0.0, 30.0, 61.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    walk = consecutive(make_suite(40), SUBJECT, limit=3, seed=3)
    log = Log()
    steps = [step for _, step, _ in pending_steps([walk], log, log, Journal(None, {}), lambda: None, minutes=1)]
    assert steps == [walk.blocks[0][0]]
