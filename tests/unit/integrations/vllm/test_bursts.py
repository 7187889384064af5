"""Many known prompts at once: no step has more rows of grafts and repairs than its limit, and no answer is another one."""

from __future__ import annotations

import random

import numpy as np
import pytest
from stand_ins import Engine, Request
from test_graft_scheduler import make_graft

LIMIT = 300
DOCUMENTS = [random.Random(seed).choices(range(1000), k=70) for seed in range(30)]


class Burst:
    """Requests about known documents that come at once; notes the rows of every step."""

    def __init__(self, load, number, limit=LIMIT, **options):
        self.engine = Engine(make_graft(load, selection="first_k", max_recompute_tokens_per_step=limit, **options))
        self.graft = self.engine.graft
        for document in range(3):
            self.engine.add(Request(f"donor {document}", DOCUMENTS[document] + [1, 2], {"kvgraft": "exact"}, 1))
        self.run_until_idle()
        self.rows, self.commands, self.reports = [], self.graft.commands, {}
        self.graft.commands = self.noted
        self.engine._check_reports = self.engine.told.clear  # its books know nothing of tokens computed again
        finish = self.graft.finish
        self.graft.finish = lambda request: self.reports.setdefault(request.request_id, finish(request))
        for request in range(number):
            self.add(request)

    def add(self, number):
        head = [5000 + 100 * number + place for place in range(20 + number % 7)]
        prompt = head + DOCUMENTS[number % 3] + [7000 + number] * 40
        self.engine.add(Request(str(number), prompt, None, 4))

    def noted(self, output):
        attempts = self.graft._attempts.running
        commands = self.commands(output)
        gaps = sum(
            int(np.searchsorted(graft.plan.compute, graft.end)) for graft in commands.grafts if not graft.asynchronous
        )
        repairs = [attempts[repair.request_id].claim.num_repair_rows for repair in commands.repairs]
        self.rows.append((gaps, sum(repairs)))
        return commands

    def run_until_idle(self, chunk=1000):
        for _ in range(400):
            self.engine.step(room=True, chunk=chunk)
            if not (self.engine.running or self.engine.waiting):
                break
        self.engine.step(room=True, chunk=chunk)
        assert not self.engine.running
        assert not self.engine.waiting


@pytest.mark.parametrize("load", ["auto", "sync", "async"])
@pytest.mark.parametrize("number", [8, 24])
@pytest.mark.parametrize("chunk", [1000, 33], ids=["whole", "chunked"])
def test_no_step_has_more_rows_than_its_limit(load, number, chunk):
    burst = Burst(load, number)
    burst.run_until_idle(chunk)
    assert max(gaps + repairs for gaps, repairs in burst.rows) <= LIMIT
    alone = Burst(load, 0)
    for name, report in burst.reports.items():
        alone.add(int(name))
        alone.run_until_idle()
        assert untimed(report) == untimed(alone.reports[name]), "what is reused depends on what runs beside it"
    assert all(report["kvgraft"]["shifted_tokens"] for report in burst.reports.values())


@pytest.mark.parametrize("load", ["auto", "sync", "async"])
def test_rows_of_several_requests_take_no_longer_than_the_longest_step_of_vllm(load):
    burst = Burst(load, 24, limit=100 * LIMIT, max_num_batched_tokens=2 * LIMIT)
    burst.run_until_idle()
    assert LIMIT / 2 < max(gaps + repairs for gaps, repairs in burst.rows) <= LIMIT
    assert all(report["kvgraft"]["shifted_tokens"] for report in burst.reports.values())


def untimed(report):
    spans = [{**span, "donor_id": 0} for span in report["kvgraft"]["spans"]]
    return {**report["kvgraft"], "timings_ms": None, "spans": spans}


def test_a_graft_larger_than_a_step_has_one_alone_and_is_not_overtaken():
    burst = Burst("sync", 3, limit=100)
    head = [9000 + place for place in range(150)]
    burst.engine.add(Request("large", head + DOCUMENTS[0] + [6999] * 40, None, 4))
    for number in range(4, 10):
        burst.add(number)
    burst.run_until_idle()
    (step,) = [place for place, (gaps, _) in enumerate(burst.rows) if gaps >= 150]
    assert burst.rows[step] == (150, 0)
    assert list(burst.reports)[:4] == ["0", "1", "2", "large"], "later ones wait behind it"


def test_a_request_that_ends_before_its_repair_holds_nobody_up():
    burst = Burst("auto", 6, limit=100)
    burst.engine.step(room=True, chunk=1000)
    (first,) = burst.engine.running
    burst.engine.end(first)
    burst.run_until_idle()
    assert len(burst.reports) == 6


def test_a_preempted_request_holds_nobody_up():
    burst = Burst("auto", 6, limit=100)
    burst.engine.step(room=True, chunk=1000)
    (first,) = burst.engine.running
    burst.engine.preempt(first)
    burst.engine.waiting.append(burst.engine.waiting.pop(0))  # with priorities it may be asked last
    burst.run_until_idle()
    assert len(burst.reports) == 6


def test_a_session_that_waits_for_its_next_input_holds_nobody_up():
    """It ended with its first token: its repair comes when it goes on, if ever."""
    burst = Burst("sync", 6, limit=100)
    burst.engine.step(room=True, chunk=1000)
    (first,) = burst.engine.running
    first.waits = True  # vLLM does not schedule it
    for _ in range(30):
        burst.engine.step(room=True, chunk=1000)
    assert burst.engine.running == [first]
    assert not burst.engine.waiting
    assert len(burst.reports) == 5
