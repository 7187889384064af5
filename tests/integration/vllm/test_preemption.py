"""A request that vLLM preempts begins again; what it was told and what it gave to others before stays true."""

from __future__ import annotations

import pytest

from engines import answer_of, engine, parameters, text

HEAD, OTHER_HEAD, QUESTION = text(1, 50), text(2, 70), text(3, 40)
DOCUMENT = text(5, 300)
PROMPT = OTHER_HEAD + DOCUMENT + text(6, 60)


@pytest.fixture(scope="module", params=["sync", "async"])
def served(request, model_folder):
    options = {"selection": "none", "load": request.param, "min_saved_tokens": 0, "min_run": 16}
    with engine(model_folder, "llama", options=options, max_num_batched_tokens=128) as one:
        yield one


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    yield
    served.check()


def run(served, prompt, *, preempt_after=(), max_tokens=40):
    """Answer one prompt; take its blocks away behind some of its steps, as vLLM does where memory is short."""
    served.llm.llm_engine.add_request("preempted", {"prompt_token_ids": prompt}, parameters(None, max_tokens))
    scheduler, steps, finished = served.vllm_scheduler, 0, None
    while served.llm.llm_engine.has_unfinished_requests():
        for output in served.llm.llm_engine.step():
            finished = output if output.finished else finished
        steps += 1
        if steps in preempt_after and scheduler.running:
            request = scheduler.running.pop()
            scheduler._preempt_request(request, 0.0)
    return answer_of(finished)


@pytest.mark.parametrize("preempt_after", [(2,), (4,), (12,), (3, 9, 15), tuple(range(2, 30, 7))], ids=str)
@pytest.mark.parametrize("forgotten", [False, True], ids=["donors-stay", "donors-gone"])
def test_a_preempted_graft_is_told_as_before_or_worse(served, preempt_after, forgotten, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION)
    before = run(served, PROMPT)
    assert before.shifted == len(DOCUMENT)
    served.forget_donors()
    served.donate(HEAD + DOCUMENT + QUESTION)
    known = {donor.donor_id for donor in served.scheduler.registry.catalogue}
    if forgotten:
        preempt = served.vllm_scheduler._preempt_request

        def preempt_and_forget(*args):
            preempt(*args)
            for donor in list(served.scheduler.registry.catalogue):
                if not served.scheduler.registry.catalogue.is_pinned(donor.donor_id):
                    served.scheduler.registry.forget(donor.donor_id)

        monkeypatch.setattr(served.vllm_scheduler, "_preempt_request", preempt_and_forget)
    after = run(served, PROMPT, preempt_after=preempt_after)
    assert after.report["exact_tokens"] <= before.report["exact_tokens"]
    assert after.shifted >= before.shifted
    assert after.report["spans"]
    assert after.report["num_tokens"] == len(PROMPT)
    for donor in served.scheduler.registry.catalogue:
        if donor.donor_id not in known and not forgotten and donor.start_position + donor.num_tokens > len(OTHER_HEAD):
            assert donor.generation > 0, "it was computed behind reused text"


def test_a_preempted_graft_is_no_prefix_of_anyone(served):
    cold = served.cold(PROMPT)
    served.donate(HEAD + DOCUMENT + QUESTION)
    run(served, PROMPT, preempt_after=(3, 12))
    answer = served.ask(PROMPT, "off")
    assert answer.num_cached <= len(OTHER_HEAD)
    answer.assert_like(cold)
