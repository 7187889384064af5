"""Bugs that users of vLLM have reported of other connectors, tried on ours; docs/reports.md lists them all.

The model has one layer, whose K/V follow from token and position alone: a graft that reads or keeps the wrong ones cannot
answer as a full prefill does, and every other one must.
"""

from __future__ import annotations

import collections

import pytest
import token_store
from vllm.v1.request import RequestStatus

from engines import BLOCK, TOKEN_STORE, beside, engine, parameters, text

HEAD, QUESTION = text(1, 50), text(3, 40)
DOCUMENT = text(5, 600)
OPTIONS = {
    "selection": "none",
    "load": "async",
    "max_recompute_tokens_per_step": 16,
    "min_saved_tokens": 0,
    "min_run": 16,
}
CONNECTORS = {"alone": dict, "beside a store": lambda mine: beside(TOKEN_STORE, mine)}


@pytest.fixture(scope="module", params=list(CONNECTORS))
def served(request, model_folder):
    """Grafts take several steps; eight requests do not fit into the pool of 3,200 tokens."""
    sizes = {"max_num_batched_tokens": 256, "num_gpu_blocks_override": 100}
    with engine(model_folder, "llama-1-layer", options=OPTIONS, connector=CONNECTORS[request.param], **sizes) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(request):
    if "served" not in request.fixturenames:
        yield
        return
    served = request.getfixturevalue("served")
    forget(served)
    yield
    finish(served)
    forget(served)
    served.llm.llm_engine.step()
    served.check()


def forget(served):
    token_store.SAVED.clear()
    served.forget_donors()


def finish(served):
    while served.llm.llm_engine.has_unfinished_requests():
        served.llm.llm_engine.step()


def add(served, name, prompt, max_tokens=6):
    served.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, parameters(None, max_tokens))


def abort(served, name):
    served.llm.llm_engine.abort_request([name], internal=False)


def cold(served, prompt, **options):
    """A full prefill, of which no connector keeps anything."""
    token_store.SAVED.clear()
    answer = served.cold(prompt, **options)
    token_store.SAVED.clear()
    return answer


def test_clients_leave_while_their_loads_run(served, monkeypatch):
    """vllm#43226, #46240, #51786, #46289: a client leaves while an asynchronous load runs.

    There EngineCore dies of `assert req_id in self.requests`, an id is reported as received twice, or blocks leak for ever.
    Here the one who stays gets its answer, each id is reported once and before the request is gone, all blocks are free, and
    what the aborted ones left is as good as computed.
    """
    reported, caught = collections.Counter(), 0
    scheduler = served.vllm_scheduler
    update = scheduler._update_from_kv_xfer_finished

    def counted(output):
        reported.update(output.finished_recving or ())
        assert set(output.finished_recving or ()) <= set(scheduler.requests)
        update(output)

    monkeypatch.setattr(scheduler, "_update_from_kv_xfer_finished", counted)
    served.donate(HEAD + DOCUMENT)
    for number in range(40):
        prompt = text(1000 + number, 33) + DOCUMENT[number : 200 + number] + text(2000 + number, 20)
        add(served, f"aborted {number}", prompt)
        for _ in range(number % 5):
            served.llm.llm_engine.step()
        caught += any(one.status == RequestStatus.WAITING_FOR_REMOTE_KVS for one in scheduler.requests.values())
        abort(served, f"aborted {number}")
    assert caught > 10
    finish(served)
    served.llm.llm_engine.step()
    assert max(reported.values()) == 1
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.usage == 0
    prompt = text(7, 33) + DOCUMENT + QUESTION
    answer = served.ask(prompt)
    assert answer.shifted >= len(DOCUMENT)
    answer.assert_like(cold(served, prompt))


def test_a_load_may_end_anywhere_in_a_block(served):
    """vllm#34616: an asynchronous hit that ends inside a block and not at the prompt's end is rounded up.

    There the rest of the block is K/V of tokens that nobody wrote. Here each answer is that of a full prefill.
    """
    served.donate(HEAD + DOCUMENT)
    for end in range(1, BLOCK):
        head, length = text(100 + end, 40), 2 * BLOCK + (end - 40) % BLOCK
        prompt = head + DOCUMENT[:length] + text(200 + end, 45)
        served.llm.reset_prefix_cache()
        answer = served.ask(prompt, max_tokens=4)
        assert answer.shifted == length
        answer.assert_like(cold(served, prompt, max_tokens=4))


def test_donors_of_requests_that_preempt_one_another_are_right(served, monkeypatch):
    """vllm#52360, #52470, LMCache#4955, ATOM#2146: preemption frees blocks in the step whose K/V are still to be stored.

    There another request's K/V lie under this one's key. Here each donor gives what a full prefill gives.
    """
    preempted = []
    preempt = served.vllm_scheduler._preempt_request

    def counted(request, *args, **kwargs):
        preempted.append(request)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(served.vllm_scheduler, "_preempt_request", counted)
    served.donate(HEAD + DOCUMENT)
    prompts = [text(300 + n, 100 + 9 * n) + DOCUMENT[n : 300 + n] + text(400 + n, 70) for n in range(8)]
    served.ask_many(prompts, [None] * 8, max_tokens=260)
    assert len(preempted) > 1
    monkeypatch.undo()
    donors = [donor.token_ids.tolist() for donor in served.scheduler.registry.catalogue]
    assert len(donors) > len(prompts)
    for number, tokens in enumerate(donors):
        prompt = text(500 + number, 21) + tokens + text(600 + number, 9)
        served.llm.reset_prefix_cache()
        answer = served.ask(prompt, max_tokens=2)
        assert answer.shifted >= len(tokens) - BLOCK
        answer.assert_like(cold(served, prompt, max_tokens=2))


@pytest.mark.parametrize("pause", [0, 2], ids=["at once", "later"])
def test_a_prompt_is_aborted_and_sent_again(served, pause):
    """vllm#56525, #37152: a prompt is aborted and sent again, and what was announced of it was never written.

    There the answer is "multilingual word salad". Here it is a full prefill's, wherever the first attempt had come to.
    """
    served.donate(HEAD + DOCUMENT)
    for steps in range(8):
        for kind, document in (("graft", DOCUMENT), ("cold", text(700 + steps, 600))):
            prompt = text(800 + steps, 40) + document + text(900 + steps, 60)
            expected = cold(served, prompt, max_tokens=3)
            add(served, f"{kind} {steps} {pause}", prompt)
            for _ in range(steps):
                served.llm.llm_engine.step()
            abort(served, f"{kind} {steps} {pause}")
            for _ in range(pause):
                served.llm.llm_engine.step()
            served.ask(prompt, max_tokens=3).assert_like(expected)
