"""Figures against numbers worked out by hand, and the stock reference against passes that keep nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvgraft.fidelity import answer_nll, divergence, stock_answer, stock_logits, stock_reference
from kvgraft.testing.tiny_models import tiny_model


def logits(*rows):
    return torch.tensor(rows, dtype=torch.float64).log()


class TestDivergence:
    def test_of_two_coins(self):
        found = divergence(logits([0.5, 0.5], [0.9, 0.1]), logits([0.25, 0.75], [0.9, 0.1]))
        first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
        middle = (0.375, 0.625)
        js = 0.5 * (0.5 * math.log(0.5 / middle[0]) + 0.5 * math.log(0.5 / middle[1]))
        js += 0.5 * (0.25 * math.log(0.25 / middle[0]) + 0.75 * math.log(0.75 / middle[1]))
        assert found.first_kl == pytest.approx(first)
        assert found.mean_kl == pytest.approx(first / 2)
        assert found.mean_js == pytest.approx(js / 2)
        assert found.top1 == 0.5
        assert found.first_flip
        assert (found.equal_tokens, found.greedy_equal) == (0, False)

    def test_direction_is_from_full_to_reused(self):
        forth = divergence(logits([0.9, 0.1]), logits([0.5, 0.5]))
        back = divergence(logits([0.5, 0.5]), logits([0.9, 0.1]))
        assert forth.mean_kl == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))
        assert back.mean_kl != pytest.approx(forth.mean_kl)
        assert back.mean_js == pytest.approx(forth.mean_js)

    def test_first_difference_ends_the_equal_tokens(self):
        one, other = [0.7, 0.2, 0.1], [0.2, 0.7, 0.1]
        found = divergence(logits(one, one, one, one), logits(one, one, other, one))
        assert (found.equal_tokens, found.num_tokens, found.greedy_equal) == (2, 4, False)
        assert found.top1 == 0.75
        assert not found.first_flip

    def test_equal_logits_are_nothing_apart(self):
        same = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
        found = divergence(same, same)
        assert (found.mean_kl, found.first_kl, found.top1, found.greedy_equal) == (0, 0, 1, True)
        assert found.mean_js == pytest.approx(0, abs=1e-15)

    def test_probabilities_that_underflow_are_finite(self):
        sure, other = torch.tensor([[0.0, -2000.0]]), torch.tensor([[-2000.0, 0.0]])
        assert divergence(sure, other).mean_js == pytest.approx(math.log(2))


def test_nll_is_per_token_of_the_answer():
    found = answer_nll(logits([0.5, 0.5], [0.125, 0.875]), [0, 0])
    assert found == pytest.approx((math.log(2) + math.log(8)) / 2)


class TestStock:
    @pytest.mark.parametrize("family", ["llama", "gemma2"])
    def test_one_prefill_gives_what_passes_without_a_cache_give(self, family):
        model = tiny_model(family)
        prompt, gold = np.arange(3, 90), np.array([5, 17, 4, 200])
        expected = stock_answer(model, prompt, 12)
        found = stock_reference(model, prompt, 12, gold)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.gold_logits, stock_logits(model, prompt, gold), rtol=1e-4, atol=1e-5)

    def test_without_an_answer(self):
        assert len(stock_reference(tiny_model("llama"), np.arange(3, 20), 2, np.empty(0, np.int64)).gold_logits) == 0
