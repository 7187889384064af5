"""Models whose RoPE angles depend on a sequence's length: each request gets what it would get alone, in every mode.

transformers chooses the angles of a pass by the highest position in it, whichever sequence that position belongs to.
"""

from __future__ import annotations

import asyncio
import copy

import numpy as np
import pytest
import torch

from kvgraft.engine import LLM, AsyncLLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model
from kvgraft.errors import ConfigError, ModelError
from kvgraft.testing.tiny_models import VOCABULARY, tiny_model
from kvgraft.types import MissReason

SWITCH = 64
"""Sequences of more tokens than this take the other table."""
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 8.0,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + 4.0 * i for i in range(8)],
        "original_max_position_embeddings": SWITCH,
    },
    "original_max_position_embeddings": SWITCH,
    "max_position_embeddings": 512,
}
WINDOWED = LONGROPE | {"sliding_window": 24}
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "max_position_embeddings": 96,
}
MODES = ["off", "exact", "graft"]
CONFIGURATIONS = pytest.mark.parametrize("overrides", [LONGROPE, WINDOWED], ids=["full", "windows"])


def loaded(family="phi3", overrides=LONGROPE):
    return adopt_model(family, tiny_model(family, **overrides), None)


def make(overrides=LONGROPE, **settings):
    return LLM(loaded(overrides=overrides), **({"num_slots": 800, "selection": "none"} | settings))


def random_prompt(rng, length):
    return rng.integers(3, VOCABULARY, length)


@torch.inference_mode()
def stock_generate(family, overrides, prompt, count):
    """Tokens of transformers' own `generate`, and the margin of each over the runner-up."""
    model = tiny_model(family, **overrides)
    ids = torch.from_numpy(prompt)[None]
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    margins = [float(-logits[0].topk(2).values.diff()) for logits in result.logits]
    return result.sequences[0, len(prompt) :].tolist(), margins


@torch.inference_mode()
def stock_logits(overrides, token_ids):
    model = tiny_model("phi3", **overrides)
    return model(torch.from_numpy(token_ids)[None], use_cache=False).logits[0, -1]


def assert_same_up_to_ties(token_ids, expected):
    for got, want, margin in zip(token_ids, *expected, strict=True):
        if got != want:
            assert margin < 1e-4
            return


def assert_close(actual, expected):
    assert float((actual - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@CONFIGURATIONS
@pytest.mark.parametrize("reuse", ["exact", "graft"])
@pytest.mark.parametrize("length", [SWITCH, SWITCH + 1, 300])
def test_prompt_behind_a_cached_short_prefix_is_answered_like_a_cold_one(rng, overrides, reuse, length):
    llm = make(overrides)
    prompt = random_prompt(rng, length)
    llm.generate(prompt[:50], SamplingParams(4), reuse)
    actual = llm.score(prompt, [5], reuse).logits[0]
    assert_close(actual, stock_logits(overrides, prompt))


@CONFIGURATIONS
@pytest.mark.parametrize("reuse", ["exact", "graft"])
def test_prompt_that_is_a_prefix_of_a_cached_long_one_is_answered_like_a_cold_one(rng, overrides, reuse):
    llm = make(overrides)
    prompt = random_prompt(rng, 300)
    llm.generate(prompt, SamplingParams(4), reuse)
    assert_close(llm.score(prompt[:50], [5], reuse).logits[0], stock_logits(overrides, prompt[:50]))


@CONFIGURATIONS
def test_long_prompts_share_their_prefix_however_short_it_is(rng, overrides):
    llm = make(overrides)
    prompt = random_prompt(rng, 300)
    other = np.concatenate([prompt[:40], random_prompt(rng, 100)])
    llm.generate(prompt, SamplingParams(1), "exact")
    score = llm.score(other, [5], "exact")
    assert score.report.exact_tokens == 40
    assert_close(score.logits[0], stock_logits(overrides, other))


@CONFIGURATIONS
@pytest.mark.parametrize("max_rows", [1, 64])
def test_long_prompt_computed_in_pieces_is_answered_as_in_one(rng, overrides, max_rows):
    llm = make(overrides, max_rows=max_rows)
    prompt = random_prompt(rng, 200)
    assert_close(llm.score(prompt, [5], "off").logits[0], stock_logits(overrides, prompt))
    tokens = llm.generate(prompt, SamplingParams(5, ignore_eos=True), "off")[0].token_ids
    assert_same_up_to_ties(tokens, stock_generate("phi3", overrides, prompt, 5))


@CONFIGURATIONS
@pytest.mark.parametrize("reuse", MODES)
def test_short_prompt_decoded_beside_a_long_stream_is_answered_as_alone(rng, overrides, reuse):
    short, long = random_prompt(rng, 40), random_prompt(rng, 300)

    async def run(llm, prompt, count):
        request = await llm.prepare(prompt, SamplingParams(count, ignore_eos=True), reuse)
        return [part.token_id async for part in llm.stream(request)]

    async def main():
        llm = AsyncLLM(loaded(overrides=overrides), num_slots=1_000, selection="none")
        results = await asyncio.gather(run(llm, long, 15), run(llm, short, 10), run(llm, long[::-1].copy(), 10))
        await llm.check()
        await llm.close()
        return results

    results = asyncio.run(main())
    for tokens, prompt in zip(results, (long, short, long[::-1].copy()), strict=True):
        assert_same_up_to_ties(tokens, stock_generate("phi3", overrides, prompt, len(tokens)))


@CONFIGURATIONS
@pytest.mark.parametrize("reuse", MODES)
@pytest.mark.parametrize("length", [SWITCH - 5, SWITCH, SWITCH + 1])
def test_request_that_outgrows_the_short_table_gives_what_generate_gives(rng, overrides, reuse, length):
    """Phi-3's `generate` computes the whole sequence again with the other table, once."""
    llm = make(overrides)
    prompt = random_prompt(rng, length)
    output = llm.generate(prompt, SamplingParams(9, ignore_eos=True), reuse)[0]
    assert_same_up_to_ties(output.token_ids, stock_generate("phi3", overrides, prompt, 9))
    assert output.report.computed_tokens == length
    llm.check()
    again = llm.generate(prompt, SamplingParams(9, ignore_eos=True), reuse)[0]
    assert_same_up_to_ties(again.token_ids, stock_generate("phi3", overrides, prompt, 9))
    continued = np.concatenate([prompt, output.token_ids])
    assert_close(llm.score(continued, [5], reuse).logits[0], stock_logits(overrides, continued))


def test_streams_that_outgrow_the_table_one_after_another_disturb_nobody(rng):
    prompts = [random_prompt(rng, n) for n in (40, 50, 60, 63, 64, 65, 200)]

    async def run(llm, prompt):
        request = await llm.prepare(prompt, SamplingParams(30, ignore_eos=True), "exact")
        return [part.token_id async for part in llm.stream(request)]

    async def main():
        llm = AsyncLLM(loaded(), num_slots=500, selection="none")
        results = await asyncio.gather(*(run(llm, prompt) for prompt in prompts))
        await llm.check()
        await llm.close()
        return results

    for tokens, prompt in zip(asyncio.run(main()), prompts, strict=True):
        assert_same_up_to_ties(tokens, stock_generate("phi3", LONGROPE, prompt, 30))


@pytest.mark.parametrize(("family", "overrides"), [("phi3", LONGROPE), ("llama", DYNAMIC)])
def test_graft_is_refused_with_a_reason(rng, family, overrides):
    llm = LLM(loaded(family, overrides), num_slots=1_000)
    document = random_prompt(rng, 50)
    llm.generate(document, SamplingParams(2))
    report = llm.generate(np.concatenate([random_prompt(rng, 9), document]), SamplingParams(2))[0].report
    assert report.miss.reason is MissReason.MODEL_REFUSED
    assert "length" in report.miss.detail
    assert report.shifted_tokens == report.recomputed_tokens == 0


def test_scores_do_not_straddle_the_two_tables(rng):
    llm = make()
    with pytest.raises(ConfigError, match="64 tokens"):
        llm.score(random_prompt(rng, 60), random_prompt(rng, 10))
    assert len(llm.score(random_prompt(rng, 60), random_prompt(rng, 5)).logits) == 5


def test_dynamic_ntk_is_served_up_to_the_length_where_its_angles_begin_to_change(rng):
    llm = LLM(loaded("llama", DYNAMIC), num_slots=1_000)
    prompt = random_prompt(rng, 60)
    assert llm.max_model_len == 96
    tokens = llm.generate(prompt, SamplingParams(500, ignore_eos=True), "exact")[0].token_ids
    assert len(tokens) == 36
    assert_same_up_to_ties(tokens, stock_generate("llama", DYNAMIC, prompt, 36))
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(loaded("llama", DYNAMIC), num_slots=1_000, max_model_len=97)


def test_table_of_a_length_that_the_configuration_does_not_tell_is_noticed():
    """The self-check asks the model, not its configuration: here the table switches where nobody says so."""
    model = tiny_model("phi3", **LONGROPE)
    other = tiny_model("phi3", **copy.deepcopy(LONGROPE)).config
    other.original_max_position_embeddings = other.rope_parameters["original_max_position_embeddings"] = 100
    model.model.rotary_emb.config = other
    with pytest.raises(ModelError, match="length"):
        LLM(adopt_model("phi3", model, None), num_slots=1_000)


def test_a_dictated_answer_that_would_begin_again_is_refused(rng):
    """A request begins again with the other table at the switch; an answer that is given beforehand cannot."""
    llm = make()
    for length, count in ((SWITCH - 14, 40), (SWITCH, 2)):
        with pytest.raises(ConfigError, match="other angles for more than 64 tokens"):
            llm.dictate(random_prompt(rng, length), [], SamplingParams(count, ignore_eos=True))
    assert len(llm.dictate(random_prompt(rng, SWITCH - 14), [], SamplingParams(15, ignore_eos=True)).token_ids) == 15
    llm.check()
