"""What a graft computes is what a full prefill computes, given the K/V that it reuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from models import FAMILIES, save_tiny

from engines import engine, text
from kvgraft.engine import LLM, SamplingParams
from kvgraft.types import GraftPlan, Match

HEAD, OTHER_HEAD, QUESTION, OTHER_QUESTION = text(1, 50), text(2, 130), text(3, 40), text(4, 45)
DOCUMENT = text(5, 700)


@pytest.fixture(scope="module", params=list(FAMILIES))
def served(request, model_folder):
    with engine(model_folder, request.param, options={"selection": "none"}) as one:
        yield one


@pytest.fixture(scope="module")
def reference(served, model_folder):
    """The same model in the embedded engine."""
    if served.family == "olmo2":
        pytest.skip("vLLM has put operations of its own into transformers' classes of this process")
    return LLM(save_tiny(served.family, model_folder), selection="none", min_run=32, num_slots=4096, dtype="float32")


@pytest.fixture(autouse=True)
def leaves_nothing(served):
    served.forget_donors()
    yield
    served.check()


def with_holes(served, monkeypatch, *holes):
    """Let lookups pretend that donors lack the positions of `holes`."""
    find = served.scheduler._lookup.find

    def find_with_holes(namespace, token_ids, prefix_len, *args, **kwargs):
        found = find(namespace, token_ids, prefix_len, *args, **kwargs)
        if not isinstance(found.planned, GraftPlan):
            return found
        spans, compute = [], set(found.planned.compute.tolist())
        for span in found.planned.spans:
            start = span.target_start
            for low, high in (*holes, (span.target_end, span.target_end)):
                if start < low <= span.target_end:
                    spans.append(Match(start, span.donor_id, span.donor_start + start - span.target_start, low - start))
                if span.target_start <= low < span.target_end:
                    compute |= set(range(low, high))
                start = max(start, high)
        plan = GraftPlan(len(token_ids), prefix_len, tuple(spans), np.array(sorted(compute)))
        return type(found)(plan, found.matches, found.lookup_ms)

    monkeypatch.setattr(served.scheduler._lookup, "find", find_with_holes)


def test_a_repeated_prompt_with_forced_holes_equals_the_cold_run(served, monkeypatch):
    prompt = HEAD + DOCUMENT + QUESTION
    cold = served.cold(prompt)
    served.donate(prompt)
    with_holes(served, monkeypatch, (100, 180), (300, 301), (333, 500), (640, 700))
    warm = served.ask(prompt)
    assert warm.shifted == len(prompt) - 1 - 80 - 1 - 167 - 60
    assert warm.num_cached == warm.shifted, "what is computed in the holes is not cached"
    warm.assert_like(cold)


def test_what_donor_and_prompt_begin_with_is_exact(served):
    """Nothing else is: what is moved behind it, and the blocks of a request whose load might fail, stay its own."""
    served.donate(HEAD + DOCUMENT + QUESTION, text(9, 60) + OTHER_HEAD)
    for question in (OTHER_QUESTION, text(10, 33)):
        prompt = HEAD + DOCUMENT + question
        cold = served.cold(prompt)
        warm = served.ask(prompt)
        assert (warm.report["exact_tokens"], warm.shifted) == (len(HEAD + DOCUMENT), 0)
        warm.assert_like(cold)
    behind = HEAD + DOCUMENT + OTHER_HEAD + text(11, 40)
    mixed = served.ask(behind)
    assert (mixed.report["exact_tokens"], mixed.shifted) == (len(HEAD + DOCUMENT), len(OTHER_HEAD))
    exact = served.ask(behind, "exact")
    assert exact.num_cached == 0, "nothing of either is in vLLM's own cache"
    exact.assert_like(served.cold(behind))


def test_a_conversation_that_vllm_has_lost_is_exact_turn_by_turn(served):
    """Of models with windows each turn is a text of its own, which tells what stood in front of it."""
    prompt = HEAD + DOCUMENT[:300]
    for seed in (50, 51):
        answer = served.ask(prompt, max_tokens=40)
        prompt = prompt + list(answer.tokens) + text(seed, 150)
    known = len(prompt) - 150
    cold = served.cold(prompt)
    warm = served.ask(prompt)
    assert warm.shifted == 0
    assert warm.report["exact_tokens"] >= known - 64
    assert len(warm.report["spans"]) > (served.family == "gemma3")
    warm.assert_like(cold)
    other = [prompt[0] ^ 1, *prompt[1:]]
    served.llm.reset_prefix_cache()
    assert served.ask(other).report["exact_tokens"] == 0


def test_reused_tokens_of_a_moved_document_change_the_answer(served):
    """Otherwise these tests could not tell a graft from a full prefill."""
    served.donate(HEAD + DOCUMENT + QUESTION)
    prompt = OTHER_HEAD + DOCUMENT + OTHER_QUESTION
    warm = served.ask(prompt)
    assert warm.shifted == len(DOCUMENT)
    assert warm.report["computed_tokens"] == len(OTHER_HEAD) + len(OTHER_QUESTION)
    (span,) = warm.report["spans"]
    assert (span["target_start"], span["position_delta"], span["length"]) == (130, 80, 700)
    cold = served.cold(prompt)
    shared = warm.logprobs[0].keys() & cold.logprobs[0].keys()
    assert any(abs(warm.logprobs[0][token] - cold.logprobs[0][token]) > 1e-3 for token in shared) or not shared


def test_computing_every_reused_token_again_equals_the_cold_run(served, monkeypatch):
    served.donate(HEAD + DOCUMENT + QUESTION, text(6, 60) + text(7, 300))
    prompt = OTHER_HEAD + text(7, 300) + text(8, 33) + DOCUMENT + OTHER_QUESTION
    cold = served.cold(prompt)
    from kvgraft.graft.select import FirstK

    monkeypatch.setattr(served.worker, "_policy", FirstK(100_000))
    warm = served.ask(prompt)
    assert warm.report["recomputed_tokens"] == 1000
    warm.assert_like(cold)


@pytest.mark.parametrize("num_donors", [2, 5])
def test_several_donors_in_another_order_give_what_the_embedded_engine_gives(served, reference, num_donors):
    """The embedded engine grafts with transformers' own attention; its sparse forward is proved against the stock one."""
    documents = [text(40 + number, 120) for number in range(num_donors)]
    donors = [text(60 + number, 20 + number) + document for number, document in enumerate(documents)]
    order = [3, 0, 4, 1, 2] if num_donors == 5 else [1, 0]
    prompt = HEAD + [token for number in order for token in documents[number] + text(80 + number, 10)] + QUESTION
    served.donate(*donors)
    reference.reset()
    for donor in donors:
        reference.generate(donor, SamplingParams(1))
    warm = served.ask(prompt)
    expected = reference.score(prompt, [0])
    assert warm.report["num_donors"] == num_donors
    assert warm.shifted == expected.report.shifted_tokens == 120 * num_donors
    assert [span["target_start"] for span in warm.report["spans"]] == [50 + 130 * n for n in range(num_donors)]
    logprobs = torch.log_softmax(expected.logits[0].float(), -1)
    for token, logprob in warm.logprobs[0].items():
        assert logprob == pytest.approx(float(logprobs[token]), abs=1e-4)
    full = torch.log_softmax(reference.score(prompt, [0], reuse="off").logits[0].float(), -1)
    assert float((full - logprobs).abs().max()) > 1e-3, "a full prefill answers alike: this test could not fail"


def test_what_a_grafted_prompt_computed_is_reused_in_turn(served):
    served.donate(HEAD + DOCUMENT + QUESTION)
    fresh = text(30, 200)
    first = served.ask(OTHER_HEAD + DOCUMENT + fresh + text(31, 100) + QUESTION)
    assert first.shifted >= len(DOCUMENT)
    served.llm.reset_prefix_cache()
    second = served.ask(text(32, 77) + fresh + OTHER_QUESTION)
    assert second.shifted == len(fresh)
    assert second.report["spans"][0]["generation"] == 1


def test_generated_text_is_reused(served):
    prompt = HEAD + DOCUMENT[:200] + QUESTION
    answer = served.ask(prompt, max_tokens=150)
    served.llm.reset_prefix_cache()
    follow_up = text(33, 90) + prompt[50:] + list(answer.tokens) + OTHER_QUESTION
    warm = served.ask(follow_up)
    assert warm.shifted >= 240 + 128


def test_grafts_behind_an_exact_prefix_equal_the_cold_run(served, monkeypatch):
    """Gaps attend to the exact prefix too; of sliding windows, donors must have what lies in front of its end."""
    prompt = HEAD + DOCUMENT + QUESTION
    cold = served.cold(prompt)
    served.donate(prompt)
    served.ask(prompt[:320], "exact", max_tokens=1)
    with_holes(served, monkeypatch, (330, 350), (500, 520), (760, 770))
    warm = served.ask(prompt)
    assert warm.report["exact_tokens"] >= 256
    assert warm.shifted == len(prompt) - 1 - warm.report["exact_tokens"] - 50
    warm.assert_like(cold)
