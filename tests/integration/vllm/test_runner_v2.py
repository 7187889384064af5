"""Under Model Runner V2's order of calls answers are what they are under V1's, and no running request is set back."""

from __future__ import annotations

import pytest
from runner_v2 import call_as_v2

from engines import engine, text
from kvgraft.graft.select import FirstK
from kvgraft.integrations.vllm.worker.graft_job import GraftJob

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)
PROMPT = OTHER_HEAD + DOCUMENT + OTHER_QUESTION


@pytest.fixture(scope="module")
def patch():
    with pytest.MonkeyPatch.context() as one:
        yield one


@pytest.fixture(scope="module")
def calls(patch):
    return call_as_v2(patch)


@pytest.fixture(scope="module")
def set_back(patch):
    """Requests that run and were set back, which V2 is not told."""
    from vllm.v1.core.sched.scheduler import Scheduler

    found = []
    original = Scheduler._update_requests_with_invalid_blocks

    def update(self, requests, *args, evict_blocks=True, **kwargs):
        affected, *rest = original(self, requests, *args, evict_blocks=evict_blocks, **kwargs)
        if requests is self.running:
            found.extend(affected)
        return affected, *rest

    patch.setattr(Scheduler, "_update_requests_with_invalid_blocks", update)
    return found


@pytest.fixture(scope="module")
def served(model_folder, calls, set_back):
    with engine(model_folder, "llama", options={"load": "sync"}, num_gpu_blocks_override=700) as one:
        one.ask(text(9, 20), "off", max_tokens=1)
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served, calls, set_back):
    served.forget_donors()
    served.scheduler.counts.num_errors = 0
    calls.clear()
    set_back.clear()
    yield
    served.ask(text(9, 20), "off", max_tokens=1)
    assert not set_back
    served.check()


def test_loads_that_a_request_waits_for_begin_after_the_forward_pass_and_captures_after_sampling(served, calls):
    served.ask(HEAD + DOCUMENT, "exact", max_tokens=2)
    assert calls[:4] == ["forward", "sample", "start_load_kv", "wait_for_save"]


def test_a_repair_runs_before_the_forward_pass_of_the_second_token(served, calls):
    served.donate(HEAD + DOCUMENT + QUESTION)
    calls.clear()
    report = served.ask(PROMPT, max_tokens=3).report
    assert report["recomputed_tokens"] > 0
    assert report["repair"]["time"] == "after"
    steps = " ".join(calls).split("wait_for_save")
    assert steps[2].split() == ["start_load_kv", "forward", "sample"]


def test_a_graft_in_which_everything_is_computed_again_equals_a_cold_run(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    cold = served.cold(PROMPT)
    monkeypatch.setattr(served.worker, "_policy", FirstK(100_000))
    warm = served.ask(PROMPT, repair="before")
    assert warm.report["recomputed_tokens"] == len(DOCUMENT)
    warm.assert_like(cold)


def test_what_was_captured_after_sampling_is_what_the_forward_pass_left(served):
    """A prompt that begins as a donor does gets its K/V as they are."""
    prompt = HEAD + DOCUMENT + OTHER_QUESTION
    cold = served.cold(prompt)
    served.donate(HEAD + DOCUMENT + QUESTION)
    warm = served.ask(prompt)
    assert warm.report["exact_tokens"] >= len(HEAD + DOCUMENT)
    warm.assert_like(cold)


@pytest.mark.parametrize("place", ["passes.AllLayersPass._run", "group_kv.PagedKV.prepare", "graft_job.GraftJob.begin"])
def test_a_graft_that_fails_is_computed_from_where_the_request_stands(served, monkeypatch, place):
    cold = served.cold(PROMPT, max_tokens=12)
    served.donate(HEAD + DOCUMENT + QUESTION)
    with monkeypatch.context() as broken:
        broken.setattr(f"kvgraft.integrations.vllm.worker.{place}", _fails)
        answer = served.ask(PROMPT, max_tokens=12)
    answer.assert_like(cold)
    assert answer.shifted == 0
    assert answer.report["miss"]["reason"] == "error"


def test_a_repair_that_cannot_be_made_leaves_the_graft(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    unrepaired = served.ask(PROMPT, max_tokens=4).report
    served.llm.reset_prefix_cache()
    served.forget_donors()
    served.donate(HEAD + DOCUMENT + QUESTION)
    with monkeypatch.context() as broken:
        broken.setattr(GraftJob, "repair", _fails)
        broken.setattr(GraftJob, "compute_everything", _fails)
        report = served.ask(PROMPT, max_tokens=4).report
    assert report["shifted_tokens"] == unrepaired["shifted_tokens"] + unrepaired["recomputed_tokens"]
    assert report["recomputed_tokens"] == 0
    assert "injected" in report["repair"]["reason"]
    assert served.scheduler.counts.num_errors == 1
    assert "exact_from_token" not in report["repair"] or not report["repair"]["exact_from_token"]


def test_aborted_while_it_waits(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    core = served.llm.llm_engine
    from engines import parameters

    core.add_request("one", {"prompt_token_ids": PROMPT}, parameters(None, 4))
    core.step()
    core.abort_request(["one"])
    while core.has_unfinished_requests():
        core.step()
    assert served.ask(PROMPT).shifted > 0


def _fails(*args, **kwargs):
    raise RuntimeError("injected")
