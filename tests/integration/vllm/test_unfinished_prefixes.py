"""No pass reads blocks that vLLM hands out before they are computed, whoever computes them and when."""

from __future__ import annotations

import pytest

from engines import BLOCK, engine, text

SYSTEM, GAP, DOCUMENT = text(101, 10 * BLOCK), text(102, 11 * BLOCK), text(103, 500)
QUESTION, OTHER, LONG = text(104, 40), text(105, 60), text(106, 1300)


@pytest.fixture(scope="module", params=["sync", "async"])
def served(model_folder, request):
    options = {"selection": "none", "load": request.param}
    with engine(model_folder, "llama", options=options, max_num_batched_tokens=768) as one:
        yield one


@pytest.fixture(autouse=True)
def begins_with_a_donor_and_old_blocks(served):
    """A block that nothing has been computed in holds the K/V of text that was there before."""
    served.forget_donors()
    served.donate(text(100, 70) + DOCUMENT)
    for seed in range(3):
        served.ask(text(seed, 1900), "off", max_tokens=1)
    served.llm.reset_prefix_cache()
    yield
    served.check()


def assert_cached_is_exact(served, prompt, num_cached):
    """What vLLM's cache gives for a prompt is there, and is what a full prefill computes."""
    answer = served.ask(prompt, "off")
    assert answer.num_cached == num_cached
    answer.assert_like(served.cold(prompt))


def test_a_prefix_that_another_request_computes_in_the_same_step(served):
    first, second = served.ask_many([SYSTEM + OTHER, SYSTEM + GAP + DOCUMENT + QUESTION], ["off", None])
    assert second.report["exact_tokens"] >= len(SYSTEM)
    assert second.shifted == len(DOCUMENT)
    assert_cached_is_exact(served, SYSTEM + GAP + OTHER, len(SYSTEM + GAP))
    first.assert_like(served.cold(SYSTEM + OTHER))


def test_a_prefix_that_a_chunked_prefill_has_not_reached(served):
    beginning, gap = LONG[: 36 * BLOCK], GAP[: 3 * BLOCK]
    first, second = served.ask_many([LONG, beginning + gap + DOCUMENT], ["off", None])
    assert second.report["exact_tokens"] == len(beginning)
    assert second.shifted == len(DOCUMENT) - 1
    assert_cached_is_exact(served, beginning + gap + OTHER, len(beginning + gap))
    first.assert_like(served.cold(LONG))


def test_many_requests_of_one_new_beginning(served):
    prompts = [SYSTEM + GAP + DOCUMENT + text(seed, 30) for seed in range(6)]
    answers = served.ask_many(prompts, [None] * 6)
    assert answers[0].shifted == len(DOCUMENT)
    for answer in answers[1:]:  # grafts of their own, or what the first one's left in whole blocks
        assert answer.shifted or answer.report["exact_tokens"] == len(SYSTEM + GAP)
        assert answer.shifted + answer.report["continued_tokens"] > len(DOCUMENT) - 2 * BLOCK
    assert_cached_is_exact(served, SYSTEM + GAP + OTHER, len(SYSTEM + GAP))


def test_what_such_a_request_computes_is_a_donor_of_exact_text(served):
    served.ask_many([SYSTEM + OTHER, SYSTEM + GAP + DOCUMENT + QUESTION], ["off", None])
    served.llm.reset_prefix_cache()
    prompt = text(107, 50) + GAP + OTHER
    wrong = served.ask(prompt)
    served.forget_donors()
    served.donate(SYSTEM + GAP)
    assert wrong.shifted == len(GAP)
    wrong.assert_like(served.ask(prompt))
