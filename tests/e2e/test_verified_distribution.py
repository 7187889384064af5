"""Sampled answers with `reuse="verified"` follow the distribution of a full prefill, whatever their drafts were drawn from.

Every draw has a fixed seed, so that nothing here depends on chance from run to run.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model

SEED = 11
TEMPERATURE, TOP_K = 0.5, 3
NUM_DRAWS = 200
CHI_SQUARE_999 = 26.12
"""Quantile 0.999 of the chi-square distribution with 8 degrees of freedom: 9 pairs of tokens."""


@pytest.fixture(scope="module")
def llm():
    """A tiny model, sharper than random weights are: approximate K/V change what it says."""
    model = tiny_model("llama", num_hidden_layers=4, intermediate_size=128)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    llm = LLM(adopt_model("llama", model, None), num_slots=300, max_rows=24, donor_tokens=1 << 12)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def texts():
    """A document, and a prompt that quotes it behind other text; int64 token ids."""
    rng = np.random.default_rng(SEED)
    document, beginning = (rng.integers(3, VOCABULARY, count) for count in (32, 8))
    return document, np.concatenate([beginning, document, rng.integers(3, VOCABULARY, 2)])


def draw(llm, texts, sampling, reuse, **others):
    """One answer from a cache that knows the document alone."""
    document, prompt = texts
    llm.reset()
    llm.generate(document, SamplingParams(1, ignore_eos=True), "off")
    return llm.generate(prompt, sampling, reuse, **others)[0]


def sampled(seed, tokens=2):
    return SamplingParams(tokens, temperature=TEMPERATURE, top_k=TOP_K, seed=seed, ignore_eos=True)


def likeliest(logits):
    """The `TOP_K` likeliest tokens and their probabilities."""
    values, ids = logits.topk(TOP_K)
    return dict(zip(ids.tolist(), (values / TEMPERATURE).softmax(dim=-1).tolist(), strict=True))


@pytest.fixture(scope="module")
def expected(llm, texts):
    """Probability of every pair of tokens, by full prefill's logits."""
    _, prompt = texts
    firsts = likeliest(llm.score(prompt, [0], "off").logits[0])
    seconds = {first: likeliest(llm.score(prompt, [first, 0], "off").logits[1]) for first in firsts}
    return {
        (a, b): firsts[a] * seconds[a][b] for a, b in product(firsts, range(llm.loaded.vocab_size)) if b in seconds[a]
    }


def chi_square(expected, answers):
    """Sum over all pairs; a pair that full prefill never gives is a failure by itself."""
    found = Counter(answers)
    assert set(found) <= set(expected)
    total = len(answers)
    return sum((found[pair] - total * share) ** 2 / (total * share) for pair, share in expected.items())


def test_the_test_can_fail(expected):
    """Enough answers are expected of every kind, and draws from a somewhat other distribution are told apart."""
    assert len(expected) == TOP_K**2
    assert sum(expected.values()) == pytest.approx(1)
    assert NUM_DRAWS * min(expected.values()) > 3
    rng = np.random.default_rng(0)
    pairs, shares = list(expected), np.array(list(expected.values()))
    for other, is_told in ((shares, False), (shares**0.5, True)):
        drawn = [pairs[i] for i in rng.choice(len(pairs), NUM_DRAWS, p=other / other.sum())]
        assert (chi_square(expected, drawn) > CHI_SQUARE_999) is is_told


@pytest.mark.slow
@pytest.mark.parametrize("is_seeded", [True, False])
def test_answers_follow_full_prefill(llm, texts, expected, is_seeded):
    torch.manual_seed(17)
    outputs = [draw(llm, texts, sampled(seed if is_seeded else None), "verified") for seed in range(NUM_DRAWS)]
    healing = [output.report.healing for output in outputs]
    assert all(healing)
    assert sum(found.retracted_tokens for found in healing) > NUM_DRAWS / 50, "drafts follow another distribution"
    assert chi_square(expected, [output.token_ids for output in outputs]) < CHI_SQUARE_999


def test_a_graft_follows_another_distribution(llm, texts, expected):
    """Or the test above would say nothing."""
    sampling = [sampled(seed) for seed in range(NUM_DRAWS // 4)]
    answers = [draw(llm, texts, each, "graft", selection="none", correction="none").token_ids for each in sampling]
    assert not set(answers) <= set(expected) or chi_square(expected, answers) > CHI_SQUARE_999


def test_a_seed_gives_what_it_gives_without_reuse(llm, texts):
    for seed in range(40):
        verified, off = (draw(llm, texts, sampled(seed, tokens=12), reuse) for reuse in ("verified", "off"))
        assert verified.report.healing is not None
        assert verified.token_ids == off.token_ids
