"""A repair after the first token goes out with the step of the second, once, and what is told of it is true."""

from __future__ import annotations

from dataclasses import replace

import pytest
from stand_ins import Engine, Request
from test_graft_scheduler import DOCUMENTS, make_graft

from kvgraft.integrations.vllm.messages import WorkerReport
from kvgraft.reuse.outcome import GraftOutcome
from kvgraft.types import RepairTime

HEAD = 30
PROMPT = list(range(5000, 5000 + HEAD)) + DOCUMENTS[0] + [7000] * 40
REPAIRED = GraftOutcome(((HEAD, 16),), 2.0, 5.0, corrected_tokens=54)
GAUGES = {"donors": 0, "donor_tokens": 0, "host_bytes": 0, "host_limit_bytes": 0, "is_refused": False}


class Served:
    """An engine that knows the document; notes commands of every step, and what clients get."""

    def __init__(self, load):
        self.engine = Engine(make_graft(load, selection="first_k"))
        self.graft = self.engine.graft
        self.engine.add(Request("donor", DOCUMENTS[0] + [1, 2], {"kvgraft": "exact"}, 1))
        self.step(2)
        self.graft.counts.take(**GAUGES)
        self.commands, self.sent = [], {}
        commands, finish = self.graft.commands, self.graft.finish
        self.graft.commands = lambda output: self.commands.append(commands(output)) or self.commands[-1]

        def told(request):
            self.sent[request.request_id] = finish(request)["kvgraft"]
            return {"kvgraft": self.sent[request.request_id]}

        self.graft.finish = told
        self.engine._check_reports = self.engine.told.clear  # its books know nothing of tokens computed again

    def add(self, max_tokens=4, **asked):
        request = Request("one", PROMPT, asked or None, max_tokens)
        self.engine.add(request)
        return request

    def step(self, number=1, chunk=400):
        for _ in range(number):
            self.engine.step(room=True, chunk=chunk)

    def until_drawn(self, request, number):
        while request.num_tokens - request.num_prompt_tokens < number and "one" not in self.sent:
            self.step()

    def repairs(self):
        """Numbers of the steps with a repair, from the first one noted."""
        return [number for number, commands in enumerate(self.commands) if commands.repairs]

    def tells_of_repairs(self, outcome):
        report = self.engine.workers.report

        def told():
            made = report()
            return WorkerReport(
                made.outcomes,
                made.lost_texts,
                made.lost_donors,
                store=made.store,
                repairs=dict.fromkeys(made.repairs, outcome),
            )

        self.engine.workers.report = told


@pytest.fixture(params=["sync", "async"])
def served(request):
    return Served(request.param)


@pytest.mark.parametrize("max_tokens", [2, 3, 9], ids=["ends-with-it", "ends-later", "longer"])
def test_repaired_once_with_the_second_token(served, max_tokens):
    served.tells_of_repairs(REPAIRED)
    request = served.add(max_tokens)
    served.until_drawn(request, 1)
    assert not served.repairs()
    served.step(12)
    (step,) = served.repairs()
    (repair,) = served.commands[step].repairs
    assert (repair.request_id, len(repair.block_ids[0])) == ("one", 3), "blocks of the whole prompt"
    report = served.sent["one"]
    assert report["repair"] == {
        "time": "after",
        "reason": None,
        "from_token": 2,
        "rows_per_step": 0,
        "exact_from_token": None,
        "healed_tokens": 0,
    }
    assert (report["shifted_tokens"], report["recomputed_tokens"], report["corrected_tokens"]) == (54, 16, 54)
    assert report["recomputed_runs"] == [[HEAD, 16]]
    assert report["timings_ms"]["recompute"] == 5.0
    assert served.graft.counts.take(**GAUGES)["prompt_tokens/recomputed/approx"] == 16
    assert served.graft.num_states == 0


def test_not_before_the_whole_prompt_is_computed(served):
    request = served.add()
    for _ in range(30):
        served.step(chunk=7)
        if served.repairs():
            break
    assert request.computed == len(PROMPT) + 1
    assert request.num_tokens == len(PROMPT) + 2


def test_the_prompts_text_is_captured_after_the_repair(served):
    """Workers capture after the step's forward pass, so that the donor has what was repaired before it."""
    request = served.add()
    served.until_drawn(request, 2)
    (step,) = served.repairs()
    captured = [capture for commands in served.commands[:step] for capture in commands.captures]
    assert not captured
    (capture,) = served.commands[step].captures
    assert (capture.start, capture.stop) == (HEAD + len(DOCUMENTS[0]), len(PROMPT))


def test_an_answer_of_one_token_is_repaired_before(served):
    served.add(max_tokens=1)
    served.step(4)
    assert not served.repairs()
    repair = served.sent["one"]["repair"]
    assert (repair["time"], repair["reason"], repair["from_token"]) == ("before", "one token was asked for", 1)


def test_a_request_may_ask_for_it(served):
    served.add(kvgraft_repair="before")
    served.step(8)
    assert not served.repairs()
    repair = served.sent["one"]["repair"]
    assert (repair["time"], repair["reason"], repair["from_token"]) == ("before", None, 1)


def test_a_time_that_is_none_reuses_nothing_and_says_so(served):
    served.add(kvgraft_repair="later")
    served.step(8)
    miss = served.sent["one"]["miss"]
    assert miss == {
        "reason": "reuse_off",
        "detail": "kv_transfer_params['kvgraft_repair'] must be before or after, not 'later'",
    }


def test_an_answer_that_ends_with_its_first_token_is_not_repaired(served):
    request = served.add()
    served.until_drawn(request, 1)
    served.engine.end(request)
    served.step(2)
    assert not served.repairs()
    assert not served.engine.workers.unrepaired, "workers keep nothing for it"
    report = served.sent["one"]
    assert (report["repair"]["time"], report["repair"]["from_token"]) == ("after", None)
    assert (report["shifted_tokens"], report["recomputed_tokens"]) == (len(DOCUMENTS[0]), 0)
    assert served.graft.num_states == 0


def test_an_answer_that_has_ended_when_its_repair_is_under_way_waits_for_nothing():
    """With asynchronous scheduling the second step is out before the first token is known to be the last."""
    served = Served("sync")
    request = served.add()
    served.until_drawn(request, 1)
    output = served.engine.output_of([request])
    assert served.graft.commands(output).repairs
    report = served.graft.finish(request)["kvgraft"]
    served.graft.receive(WorkerReport(repairs={"one": REPAIRED}))
    assert (report["repair"]["from_token"], report["recomputed_tokens"]) == (None, 0)
    assert served.graft.num_states == 0


@pytest.mark.parametrize("drawn", [1, 3], ids=["before-the-repair", "after-it"])
def test_a_preempted_request_begins_its_schedule_anew(served, drawn):
    """What it had drawn stays; nobody waits for a first token any more, so that nothing is drawn from unrepaired K/V."""
    request = served.add(max_tokens=9)
    served.until_drawn(request, drawn)
    served.engine.preempt(request)
    served.step(20)
    assert len(served.repairs()) == (drawn > 1)
    assert not served.engine.workers.unrepaired
    repair = served.sent["one"]["repair"]
    assert (repair["time"], repair["from_token"]) == ("after", 2)


def test_nothing_is_repaired_once_the_model_may_be_another(served):
    request = served.add(max_tokens=9)
    served.until_drawn(request, 1)
    served.graft.reset(prefixes_are_gone=False)
    served.step(12)
    assert not served.repairs()
    assert not served.engine.workers.unrepaired
    report = served.sent["one"]
    assert report["repair"]["reason"] == "donors were forgotten before the second token"
    assert (report["repair"]["from_token"], report["recomputed_tokens"]) == (None, 0)


def test_weights_that_workers_find_changed_are_not_repaired_with(served):
    request = served.add(max_tokens=9)
    served.until_drawn(request, 1)
    served.engine.epoch += 1
    served.step(12)
    assert len(served.repairs()) == 1, "the scheduler does not know yet"
    report = served.sent["one"]
    assert (report["repair"]["reason"], report["repair"]["from_token"]) == ("gone", None)


def test_a_repair_that_failed_left_nothing_approximate(served):
    """Its graft is still told: the first token was drawn from it."""
    served.tells_of_repairs(GraftOutcome((), 2.0, 5.0, fell_back="no memory"))
    served.add(max_tokens=9)
    served.step(12)
    report, counts = served.sent["one"], served.graft.counts.take(**GAUGES)
    repair = report["repair"]
    assert (repair["reason"], repair["from_token"], repair["exact_from_token"]) == ("no memory", 2, 2)
    assert repair["healed_tokens"] == len(PROMPT) - report["spans"][0]["target_start"], "what was computed again counts"
    assert (report["shifted_tokens"], report["miss"]) == (len(DOCUMENTS[0]), None)
    assert counts["graft_errors"] == 1


def test_a_graft_that_fell_back_has_nothing_to_repair(served):
    served.engine.fate = "falls back"
    served.add(max_tokens=9)
    served.step(12)
    assert not served.repairs()
    assert served.sent["one"]["repair"] is None
    captured = [capture.stop for commands in served.commands for capture in commands.captures]
    assert len(PROMPT) in captured, "its text waits for no repair"


def test_the_slower_rank_tells_of_a_repair():
    mine = WorkerReport(repairs={"one": GraftOutcome(((3, 4),), 1.0, 2.0)})
    other = WorkerReport(repairs={"one": GraftOutcome(((3, 4),), 1.0, 7.0), "two": REPAIRED})
    joined = mine.joined(other).repairs
    assert joined == {"one": GraftOutcome(((3, 4),), 1.0, 7.0), "two": REPAIRED}


def test_an_answer_that_the_context_ends_at_its_first_token_waits_for_the_repair(monkeypatch):
    """vLLM does not cut `max_tokens` to what fits."""
    for room, reason in ((1, "one token was asked for"), (2, None)):
        served = Served("sync")
        attempts = served.graft._attempts
        monkeypatch.setattr(attempts, "_facts", replace(attempts._facts, max_model_len=len(PROMPT) + room))
        served.add(max_tokens=9)
        served.step()
        repair = attempts.running["one"].attempt.repair
        assert (repair.time, repair.reason or None) == (RepairTime.BEFORE if reason else RepairTime.AFTER, reason)
