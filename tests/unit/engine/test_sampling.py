from __future__ import annotations

import pytest
import torch

from kvgraft.engine.sampling import Sampler, SamplingParams
from kvgraft.errors import ConfigError

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0])


def draws(params, count=400):
    sampler = Sampler(params, torch.device("cpu"))
    return [sampler.sample(LOGITS) for _ in range(count)]


def test_temperature_0_is_greedy():
    assert set(draws(SamplingParams(temperature=0.0), 5)) == {1}


def test_top_k_draws_from_the_k_most_likely():
    assert set(draws(SamplingParams(temperature=2.0, top_k=2, seed=1))) == {1, 3}


def test_top_p_keeps_the_token_that_crosses_the_threshold():
    # Probabilities at temperature 1 are about 0.03, 0.64, 0.09, 0.24.
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.6, seed=1))) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.7, seed=1))) == {1, 3}


def test_frequencies_follow_the_softmax():
    counts = torch.bincount(torch.tensor(draws(SamplingParams(temperature=1.0, seed=3), 4_000)), minlength=4) / 4_000
    torch.testing.assert_close(counts, LOGITS.softmax(-1), atol=0.03, rtol=0)


def test_seed_makes_draws_reproducible():
    params = SamplingParams(temperature=1.0, seed=9)
    assert draws(params, 50) == draws(params, 50)
    assert draws(params, 50) != draws(SamplingParams(temperature=1.0, seed=10), 50)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"stop": ("",)},
    ],
)
def test_bad_parameter_is_refused(wrong):
    with pytest.raises(ConfigError):
        SamplingParams(**wrong)
