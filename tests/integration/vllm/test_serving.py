"""Chunked prefill, preemption, aborts, many requests at once: the same answers, and nothing left behind."""

from __future__ import annotations

import pytest

from engines import BLOCK, answer_of, engine, parameters, text

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)


@pytest.fixture(scope="module", params=["sync", "async"])
def served(request, model_folder):
    """256-token chunks and a pool of about 3,000 tokens; grafts in pieces of 100 rows."""
    options = {"selection": "none", "load": request.param, "max_recompute_tokens_per_step": 100}
    with engine(model_folder, "qwen3", options=options, max_num_batched_tokens=256, num_gpu_blocks_override=100) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    yield
    drain(served)
    served.check()


def drain(served):
    while served.llm.llm_engine.has_unfinished_requests():
        served.llm.llm_engine.step()
    served.llm.llm_engine.step()


def add(served, request_id, prompt, mode=None, max_tokens=6):
    served.llm.llm_engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, parameters(mode, max_tokens))


def expected(served, prompt, *, max_tokens=6):
    """What the same graft gives when the request is alone; its own text leaves no donor behind."""
    known = {donor.donor_id for donor in served.scheduler.registry.catalogue}
    served.llm.reset_prefix_cache()
    answer = served.ask(prompt, max_tokens=max_tokens)
    served.llm.reset_prefix_cache()
    for donor in list(served.scheduler.registry.catalogue):
        if donor.donor_id not in known:
            served.scheduler.registry.forget(donor.donor_id)
    return answer


def test_donors_are_captured_chunk_by_chunk(served, monkeypatch):
    prompt = HEAD + DOCUMENT + QUESTION  # three chunks
    cold = served.cold(prompt)
    served.donate(prompt)
    (donor,) = served.scheduler.registry.catalogue
    assert donor.token_ids.tolist() == prompt
    warm = served.ask(prompt)
    assert warm.report["exact_tokens"] == len(prompt) - 1
    warm.assert_like(cold)


@pytest.mark.usefixtures("no_exact_fronts")
def test_a_tail_of_several_chunks_behind_a_graft(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    prompt = HEAD + DOCUMENT + text(6, 600)
    warm = served.ask(prompt)
    assert warm.shifted == 750
    assert warm.num_cached == 750
    warm.assert_like(served.cold(prompt))


def test_preemption_in_the_middle_of_a_prefill_and_of_decoding(served):
    """Eight requests of 790 to 1,000 tokens do not fit into 3,000; each must answer as if it were alone."""
    served.donate(HEAD + DOCUMENT + QUESTION)
    prompts = [text(100 + n, 30 * n) + DOCUMENT[: 690 - n] + text(200 + n, 30) for n in range(8)]
    alone = [expected(served, prompt, max_tokens=40) for prompt in prompts]
    preempted = 0
    original = served.vllm_scheduler._preempt_request

    def counted(*args, **kwargs):
        nonlocal preempted
        preempted += 1
        return original(*args, **kwargs)

    served.vllm_scheduler._preempt_request = counted
    try:
        together = served.ask_many(prompts, [None] * 8, max_tokens=40)
    finally:
        del served.vllm_scheduler._preempt_request
    assert preempted > 0
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        # What was generated in front of a preemption is computed behind exact K/V or reused ones again: only the first
        # tokens are certain to be those of the request that was never disturbed.
        assert one.tokens[0] == other.tokens[0], number
    served.llm.reset_prefix_cache()


def test_eight_concurrent_requests_of_mixed_kinds(served):
    served.donate(HEAD + DOCUMENT + QUESTION, text(7, 20) + text(8, 300))
    kinds = [
        (HEAD + DOCUMENT[:300] + QUESTION, None),
        (OTHER_HEAD + DOCUMENT[100:400] + OTHER_QUESTION, None),
        (text(9, 200), None),
        (OTHER_HEAD + DOCUMENT[:200] + OTHER_QUESTION, "off"),
        (text(10, 64) + text(8, 300) + QUESTION, None),
        (HEAD + DOCUMENT[:150], "exact"),
        (text(11, 10) + DOCUMENT[400:600] + text(8, 300)[:150] + QUESTION, "graft"),
        (text(12, 5), None),
    ]
    alone = []
    for prompt, mode in kinds:
        alone.append(expected(served, prompt) if mode != "off" else served.cold(prompt))
    served.llm.reset_prefix_cache()
    together = served.ask_many([prompt for prompt, _ in kinds], [mode for _, mode in kinds])
    assert sum(answer.shifted > 0 for answer in together) >= 4
    for one, other, (_, mode) in zip(together, alone, kinds, strict=True):
        if one.shifted == other.shifted:
            one.assert_like(other)
        assert mode is None or mode == "graft" or one.shifted == 0


@pytest.mark.parametrize("steps", range(7))
def test_abort_at_every_stage(served, steps):
    served.donate(HEAD + DOCUMENT + QUESTION)
    llm = served.llm.llm_engine
    for name in ("graft", "cold"):
        prompt = OTHER_HEAD + DOCUMENT + text(20, 300) if name == "graft" else text(21, 700)
        add(served, name, prompt, max_tokens=4)
    for _ in range(steps):
        llm.step()
    llm.abort_request([request.request_id for request in list(served.vllm_scheduler.requests.values())], internal=True)
    assert served.vllm_scheduler.get_num_unfinished_requests() == 0
    drain(served)
    served.check()
    prompt = OTHER_HEAD + DOCUMENT + OTHER_QUESTION
    report = served.ask(
        prompt
    ).report  # nothing is repaired here, so that what an aborted request has left is gone on from
    assert report["continued_tokens"] + report["shifted_tokens"] > len(DOCUMENT) - 2 * BLOCK


def test_a_request_that_waits_for_room_keeps_its_plan_and_its_donors(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    add(served, "big", text(30, 1900), "off", max_tokens=30)
    for _ in range(9):
        served.llm.llm_engine.step()
    add(served, "waits", OTHER_HEAD + DOCUMENT + text(31, 600), max_tokens=2)
    outputs = {}
    served.llm.llm_engine.step()
    catalogue = served.scheduler.registry.catalogue
    (donor,) = list(catalogue)
    assert catalogue.is_pinned(donor.donor_id)
    while served.llm.llm_engine.has_unfinished_requests():
        for output in served.llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = answer_of(output)
    assert outputs["waits"].shifted == len(DOCUMENT)
    assert not any(catalogue.is_pinned(donor.donor_id) for donor in catalogue)
