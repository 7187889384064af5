"""Prompts in transformers' own cache, as they are and with a similar text's K/V in front."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.suite.read_prompts import StockPrompt, common_beginning, substitute

from kvgraft.bench.fidelity.subject import stock_attention
from kvgraft.engine import LLM
from kvgraft.fidelity import stock_logits
from kvgraft.testing.tiny_models import tiny_model

PROMPT, OTHER = np.arange(100, 160), np.arange(300, 350)
CONTINUATION = np.array([7, 8, 9, 10])


@pytest.fixture(scope="module", params=("full attention", "sliding windows"))
def model(request):
    """A model of full attention, and one with windows of 24 tokens, which every prompt here fills."""
    if request.param == "sliding windows":
        yield tiny_model("gemma3_text")
        return
    llm = LLM("graft-tiny", num_slots=600)
    with llm.adapter.stock(stock_attention(llm)) as stock:
        yield stock


def test_it_says_what_a_pass_without_cache_says(model):
    behind = StockPrompt(model, PROMPT)
    torch.testing.assert_close(
        behind.logits(CONTINUATION), stock_logits(model, PROMPT, CONTINUATION), atol=1e-3, rtol=0
    )


def test_a_second_continuation_forgets_the_first(model):
    behind = StockPrompt(model, PROMPT)
    behind.logits(np.array([50, 51, 52, 53, 54]))
    torch.testing.assert_close(
        behind.logits(CONTINUATION), stock_logits(model, PROMPT, CONTINUATION), atol=1e-3, rtol=0
    )
    alone = behind.feed(2, CONTINUATION[2:3])
    whole = stock_logits(model, PROMPT, np.array([*CONTINUATION[:3], 0]))
    torch.testing.assert_close(alone, whole[3:4], atol=1e-3, rtol=0)


def test_own_text_in_front_changes_nothing_and_another_text_does(model):
    plain = StockPrompt(model, PROMPT).logits(CONTINUATION)
    torch.testing.assert_close(StockPrompt(model, PROMPT, PROMPT[:50]).logits(CONTINUATION), plain, atol=1e-3, rtol=0)
    assert (StockPrompt(model, PROMPT, OTHER).logits(CONTINUATION) - plain).abs().max() > 0.1


def test_the_baseline_takes_the_most_similar_text_and_leaves_the_question():
    near, nearer = np.concatenate([PROMPT[:40], OTHER[:20]]), np.concatenate([OTHER[:5], PROMPT[5:]])
    np.testing.assert_array_equal(substitute(PROMPT, 50, [near, nearer, OTHER]), nearer[:50])
    assert len(substitute(PROMPT, 50, [OTHER])) == len(substitute(PROMPT, 50, [])) == 0
    np.testing.assert_array_equal(substitute(PROMPT, 59, [PROMPT[:45]]), PROMPT[:45])


def test_common_beginning():
    assert common_beginning(np.array([1, 2, 3]), np.array([1, 2, 4])) == 2
    assert common_beginning(np.array([1, 2]), np.array([1, 2, 4])) == 2
    assert common_beginning(np.array([5]), np.array([1])) == 0
