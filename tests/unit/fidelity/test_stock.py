"""The reference answers of a model, against its forward over the whole text."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.fidelity.stock import stock_answer, stock_logits, stock_reference
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model


@pytest.mark.parametrize("family", ["llama", "bamba", "qwen3_next", "lfm2"])
def test_an_answer_is_what_the_whole_text_says(family, rng):
    """Bamba counts positions from 0 in every pass that is not told them."""
    model = tiny_model(family)
    prompt, gold = rng.integers(3, VOCABULARY, 70), rng.integers(3, VOCABULARY, 9)
    answer = stock_answer(model, prompt, 8)
    assert np.array_equal(answer.token_ids, answer.logits.argmax(-1).numpy())
    reference = stock_reference(model, prompt, 8, gold)
    assert np.array_equal(reference.token_ids, answer.token_ids)
    for found, expected in (
        (reference.logits, answer.logits),
        (reference.gold_logits, stock_logits(model, prompt, gold)),
    ):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
