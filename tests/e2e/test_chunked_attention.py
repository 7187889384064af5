"""Llama 4's chunked attention in the engine: where chunks end, prefixes need no windows, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.e2e.test_hybrid import GREEDY, assert_close, assert_greedy, make_llm, random_prompt, stock_logits
from transformers import Llama4Config, Llama4ForConditionalGeneration

from kvgraft.engine import LLM, SamplingParams
from kvgraft.engine.model.loading import adopt_model, load_model
from kvgraft.errors import ModelError
from kvgraft.prefix import SWARadixCache, register_radix_cache_backend
from kvgraft.testing.tiny_models import FAMILIES, VOCABULARY, tiny_model

CHUNK = 24
PAGES = [1, 8, 16, 5]
"""Pages that divide a chunk, that do not, and that share no border with one for long."""


def chunked_llm(page_size=1, **settings):
    return make_llm("llama4_text", radix_cache_backend=f"pages of {page_size}", **settings)


@pytest.fixture(autouse=True)
def _pages():
    for page_size in PAGES:
        register_radix_cache_backend(
            f"pages of {page_size}",
            lambda context, size=page_size: SWARadixCache(size, attention_chunk_size=context.attention_chunk_size),
        )


def drop_windows(llm):
    llm.space.release_forgotten(llm.space.prefix.evict(0, 10_000))
    llm.check()


@pytest.mark.parametrize("length", [47, 48, 49, 71, 72, 73])
def test_prefix_that_ends_at_a_border_or_beside_it_is_exact(length, rng):
    llm = chunked_llm()
    prompt = random_prompt(rng, length)
    llm.generate(prompt, GREEDY, "exact")
    longer = np.concatenate([prompt, random_prompt(rng, 40)])
    score = llm.score(longer, [3], "exact")
    assert score.report.exact_tokens == length
    assert_close(score.logits[0], stock_logits(llm, longer)[-1])
    llm.check()


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("length", [47, 48, 49, 96, 130])
def test_without_windows_a_prefix_is_exact_up_to_the_last_border(page_size, length, rng):
    llm = chunked_llm(page_size)
    document = random_prompt(rng, 200)
    llm.generate(document, GREEDY, "exact")
    # Something runs on the whole text, so that full attention stays while all other windows leave.
    stream = llm.stream(np.concatenate([document, random_prompt(rng, 5)]), GREEDY, "exact")
    next(stream)
    drop_windows(llm)
    prompt = np.concatenate([document[:length], random_prompt(rng, 30)])
    score = llm.score(prompt, [3], "exact")
    both = np.lcm(CHUNK, page_size)
    assert score.report.exact_tokens == length // both * both
    assert_close(score.logits[0], stock_logits(llm, prompt)[-1])
    assert len(list(stream)) == 7
    llm.check()


@pytest.mark.parametrize("count", [8, 9, 10, 33])
def test_output_that_ends_at_a_border_is_a_prefix_of_the_next_turn(count, rng):
    """The last token has no K/V yet: 40 + 9 - 1 = 48."""
    llm = chunked_llm()
    prompt = random_prompt(rng, 40)
    answer = llm.generate(prompt, SamplingParams(count, ignore_eos=True), "exact")[0].token_ids
    following = np.concatenate([prompt, answer, random_prompt(rng, 7)])
    output = llm.generate(following, GREEDY, "exact")[0]
    assert output.report.exact_tokens == 40 + count - 1
    assert_greedy(llm, following, output.token_ids, 8)


@pytest.mark.parametrize("page_size", PAGES)
def test_chat_in_pages_is_exact(page_size, rng):
    llm = chunked_llm(page_size)
    history = random_prompt(rng, 61)
    for _ in range(5):
        output = llm.generate(history, SamplingParams(29, ignore_eos=True), "exact")[0]
        assert_greedy(llm, history, output.token_ids, 29)
        history = np.concatenate([history, output.token_ids, random_prompt(rng, 4)])
        llm.check()
    assert output.report.exact_tokens > 150


def test_request_holds_no_more_than_its_chunk_while_it_decodes(rng):
    llm = chunked_llm()
    stream = llm.stream(random_prompt(rng, 100), SamplingParams(200, ignore_eos=True), "exact")
    held = [llm.space.window_usage().request for _ in stream][:-1]
    assert max(held) <= CHUNK + 16
    assert min(held) <= 17, "behind a border nothing of the chunk in front of it stays, but the leaf's one token"


def seeing_model():
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "image_size": 28,
        "patch_size": 14,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    }
    ids = {"image_token_index": 499, "boi_token_index": 498, "eoi_token_index": 497}
    torch.manual_seed(0)
    config = Llama4Config(text_config=text | FAMILIES["llama4_text"], vision_config=vision, **ids)
    return Llama4ForConditionalGeneration(config).eval()


def reads_text(model):
    """In transformers 5.24.0 the whole of such a model fails at text alone (`image_outputs`), its text part does not."""
    try:
        model(input_ids=torch.tensor([[3, 4]]))
    except AttributeError:
        return False
    return True


def test_text_of_a_model_that_sees_is_served_whole_or_alone(tmp_path, rng):
    model = seeing_model()
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu")
    assert type(loaded.model).__name__ == "Llama4ForCausalLM"
    prompt = rng.integers(3, 490, 90)
    answers = set()
    for each in (adopt_model("seeing", model, None), loaded) if reads_text(model) else (loaded,):
        llm = LLM(each, num_slots=1_000)
        answers.add(llm.generate(prompt, SamplingParams(30, ignore_eos=True), "off")[0].token_ids)
        assert_greedy(llm, prompt, next(iter(answers)), 30)
    assert len(answers) == 1


def test_stray_tensor_of_the_text_is_still_refused(tmp_path):
    model = seeing_model()
    model.language_model.model.layers[0].stray = torch.nn.Linear(2, 2)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="unexpected"):
        load_model(str(tmp_path), dtype="float32", device="cpu")


def test_chunks_longer_than_the_prompt_are_plain_causal_attention(rng):
    prompt = random_prompt(rng, 120)
    answers = set()
    for size in (200, 4_096):
        model = tiny_model("llama4_text", attention_chunk_size=size)
        llm = LLM(adopt_model("llama4", model, None), num_slots=2_000)
        answers.add(llm.generate(prompt, GREEDY, "exact")[0].token_ids)
    assert len(answers) == 1


@pytest.mark.parametrize("page_size", [8, 64])
def test_page_size_of_the_engine_suits_chunks(page_size, rng):
    """Pages longer than a chunk, too: what a request keeps is a chunk in whole pages."""
    llm = make_llm("llama4_text", page_size=page_size, hybrid_kvcache_ratio=0.3, max_running=4)
    history = random_prompt(rng, 150)
    for _ in range(3):
        output = llm.generate(history, SamplingParams(40, ignore_eos=True), "exact")[0]
        assert_greedy(llm, history, output.token_ids, 40)
        history = np.concatenate([history, output.token_ids])
        llm.check()
    assert output.report.exact_tokens >= 128
