from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)

from kvgraft.engine.sampling.sampling import Sampler
from kvgraft.engine.sampling.sampling_params import SamplingParams
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


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("min_p", [0.01, 0.2, 1.0])
def test_min_p_draws_as_transformers_does(min_p, top_k):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.8), MinPLogitsWarper(min_p)])
    if top_k:
        warpers.insert(1, TopKLogitsWarper(top_k))
    sampler = Sampler(SamplingParams(temperature=0.8, top_k=top_k, min_p=min_p), torch.device("cpu"))
    for number in range(20):
        logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(number))
        expected = warpers(torch.zeros((1, 1), dtype=torch.int64), logits[None])[0].softmax(-1)
        torch.testing.assert_close(sampler.probabilities(logits), expected, rtol=1e-5, atol=1e-7)


def test_top_p_counts_what_min_p_leaves():
    # About 0.03, 0.64, 0.09, 0.24; of the two that are left the first holds 0.73.
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.7, min_p=0.3, seed=1))) == {1}


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


@pytest.mark.parametrize("seed", [None, 5])
def test_a_fork_draws_what_the_sampler_will_draw(seed):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
    sampler = Sampler(params, torch.device("cpu"))
    logits = [torch.randn(50, generator=torch.Generator().manual_seed(n)) for n in range(20)]
    sampler.sample(logits[0])
    fork = sampler.fork()
    ahead = [fork.sample(each) for each in logits]
    assert ahead == [sampler.sample(each) for each in logits]
    assert len(set(ahead)) > 5


def test_a_fork_changes_nothing_for_its_sampler():
    params = SamplingParams(temperature=1.0, seed=3)
    one, other = (Sampler(params, torch.device("cpu")) for _ in range(2))
    logits = torch.zeros(1000)
    fork = one.fork()
    for _ in range(5):
        fork.sample(logits)
    assert [one.sample(logits) for _ in range(5)] == [other.sample(logits) for _ in range(5)]


def test_draws_from_similar_logits_mostly_meet():
    """Equal noise: two distributions that differ by a little agree far oftener than independent draws would."""
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), torch.device("cpu"))
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0))
    near = logits + 0.1 * torch.randn(200, generator=torch.Generator().manual_seed(1))
    fork = sampler.fork()
    equal = sum(fork.sample(near) == sampler.sample(logits) for _ in range(300))
    assert equal > 250
