"""Rules on logits against transformers' processors and plain sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from kvgraft.engine.sampling.logit_rules import LogitRules
from kvgraft.engine.sampling.sampling import Sampler
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.errors import NothingToDrawError

CPU = torch.device("cpu")
SIZE = 60
END = 2
PROMPT = np.random.default_rng(1).integers(3, SIZE, 30)
BAD = ((7,), (11, 12), (int(PROMPT[-1]), 20), (4, 5, 6), (9, 9))


def rules(params, prompt=PROMPT):
    return LogitRules.of(params, prompt, {END}, CPU)


def logits(number):
    return 3 * torch.randn(SIZE, generator=torch.Generator().manual_seed(number))


def tokens(count, seed=0):
    """An output that runs into the bad sequences and repeats itself."""
    drawn = np.random.default_rng(seed).integers(3, 13, count).tolist()
    return [4, 5, 11, 9, *drawn]


def assert_same_all_along(params, expected):
    """Compare with `expected(ids so far, logits)` behind each token of an output."""
    found, out = rules(params), []
    for number, token in enumerate(tokens(40)):
        given = logits(number)
        kept = given.clone()
        torch.testing.assert_close(found.apply(given), expected([*PROMPT.tolist(), *out], kept), rtol=0, atol=0)
        assert torch.equal(given, kept), "what is reported as log-probabilities is of the model's own logits"
        found.accept(token)
        out.append(token)


def processed(*processors):
    chain = LogitsProcessorList(processors)
    return lambda ids, given: chain(torch.tensor([ids]), given[None].clone())[0]


@pytest.mark.parametrize("penalty", [0.7, 1.3, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty):
    assert_same_all_along(
        SamplingParams(repetition_penalty=penalty), processed(RepetitionPenaltyLogitsProcessor(penalty))
    )


def test_bad_sequences_are_those_of_transformers():
    assert_same_all_along(
        SamplingParams(bad_token_ids=BAD), processed(NoBadWordsLogitsProcessor([list(b) for b in BAD]))
    )


def test_min_tokens_are_those_of_transformers():
    processor = MinNewTokensLengthLogitsProcessor(len(PROMPT), 6, [END, 17], device="cpu")
    assert_same_all_along(SamplingParams(min_tokens=6, stop_token_ids=(17,)), processed(processor))


def test_bias_is_that_of_transformers_and_sums_up():
    processor = SequenceBiasLogitsProcessor({(5,): 4.0, (8,): -100.0})
    assert_same_all_along(SamplingParams(logit_bias=((5, 1.5), (8, -100.0), (5, 2.5))), processed(processor))


def counted(ids, given, frequency, presence):
    count = torch.bincount(torch.tensor(ids[len(PROMPT) :], dtype=torch.int64), minlength=SIZE).float()
    return given - frequency * count - presence * (count > 0)


@pytest.mark.parametrize(("frequency", "presence"), [(0.4, 0.0), (0.0, 0.9), (-0.3, 1.2)])
def test_frequency_and_presence_count_the_output_alone(frequency, presence):
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    assert_same_all_along(params, lambda ids, given: counted(ids, given, frequency, presence))


def test_all_rules_apply_in_the_documented_order():
    allowed = tuple(range(2, 50))
    params = SamplingParams(
        allowed_token_ids=allowed,
        bad_token_ids=BAD,
        min_tokens=5,
        logit_bias=((4, 6.0), (30, -2.0), (55, 90.0)),
        repetition_penalty=1.4,
        frequency_penalty=0.3,
        presence_penalty=0.2,
    )
    chain = processed(
        NoBadWordsLogitsProcessor([list(b) for b in BAD]),
        MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, [END], device="cpu"),
        SequenceBiasLogitsProcessor({(4,): 6.0, (30,): -2.0, (55,): 90.0}),
        RepetitionPenaltyLogitsProcessor(1.4),
    )

    def expected(ids, given):
        masked = torch.full_like(given, -torch.inf)
        masked[list(allowed)] = given[list(allowed)]
        return counted(ids, chain(ids, masked), 0.3, 0.2)

    assert_same_all_along(params, expected)


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"bad_token_ids": BAD},
        {"min_tokens": 9},
    ],
)
def test_a_fork_goes_on_from_what_was_counted_and_leaves_it_alone(asked):
    one, other = rules(SamplingParams(**asked)), rules(SamplingParams(**asked))
    for token in tokens(5):
        one.accept(token)
        other.accept(token)
    fork = one.fork()
    for number, token in enumerate(tokens(100, seed=3)):
        assert torch.equal(fork.apply(logits(number)), other.apply(logits(number)))
        fork.accept(token)
        other.accept(token)
    for token in tokens(5):
        other = rules(SamplingParams(**asked)) if token == 4 else other
        other.accept(token)
    assert torch.equal(one.apply(logits(0)), other.apply(logits(0)))


def test_requests_without_rules_have_none():
    params = SamplingParams(temperature=0.8, top_p=0.5, min_p=0.1, stop=("x",), stop_token_ids=(4,), ignore_eos=True)
    assert rules(params) is None


def test_values_beyond_float32_give_numbers():
    params = SamplingParams(repetition_penalty=1e-300, logit_bias=((5, 1e308), (5, 1e308), (6, -1e308)))
    found = rules(params, np.arange(SIZE)).apply(torch.cat([torch.zeros(1), logits(0)[1:]]))
    assert not found.isnan().any()
    assert int(found.argmax()) == 5


def test_a_sampler_counts_what_it_draws():
    params = SamplingParams(frequency_penalty=2.0)
    sampler = Sampler(params, CPU, rules=rules(params))
    level = torch.zeros(SIZE)
    level[:4] = torch.tensor([0.3, 0.2, 0.1, 0.0])
    assert [sampler.sample(level) for _ in range(4)] == [0, 1, 2, 3]


def test_a_fork_of_a_sampler_with_rules_draws_what_it_will_draw():
    params = SamplingParams(temperature=1.0, repetition_penalty=1.6, frequency_penalty=0.5, bad_token_ids=BAD, seed=3)
    sampler = Sampler(params, CPU, rules=rules(params))
    given = [logits(number) for number in range(40)]
    for each in given[:10]:
        sampler.sample(each)
    fork = sampler.fork()
    ahead = [fork.sample(each) for each in given]
    assert ahead == [sampler.sample(each) for each in given]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_nothing_are_an_error_and_count_nothing(temperature):
    params = SamplingParams(temperature=temperature, allowed_token_ids=(7,), bad_token_ids=((7, 7),))
    sampler = Sampler(params, CPU, rules=rules(params, np.array([3])))
    assert sampler.sample(logits(0)) == 7
    for _ in range(2):
        with pytest.raises(NothingToDrawError, match="leave no token"):
            sampler.sample(logits(0))


class OnlyTheEnd:
    """A structure that is complete."""

    def __init__(self, is_few):
        self._few = torch.tensor([END]) if is_few else None

    def few(self, num_logits):
        del num_logits
        return self._few

    def mask(self, given):
        masked = torch.full_like(given, -torch.inf)
        masked[END] = given[END]
        return masked

    def accept(self, token_id):
        assert token_id == END

    def fork(self):
        return self


@pytest.mark.parametrize("is_few", [False, True])
def test_min_tokens_give_way_where_a_structure_leaves_nothing_but_its_end(is_few):
    from kvgraft.engine.sampling.structure import StructureSpec

    params = SamplingParams(min_tokens=10, structure=StructureSpec.regex("x"))
    assert Sampler(params, CPU, OnlyTheEnd(is_few), rules(params)).sample(logits(0)) == END
