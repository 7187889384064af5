"""Which engines are refused, by vLLM's configuration of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvgraft.config import VLLMConfig
from kvgraft.integrations.vllm.refusals import refused_engine

NGRAM = SimpleNamespace(method="ngram")


def configured(**parts):
    kinds = {
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
        "cache_config": {"cache_dtype": "auto"},
        "scheduler_config": {"async_scheduling": False},
        "model_config": {"runner_type": "generate", "hf_text_config": SimpleNamespace()},
        "aux_output_config": {"enabled": False},
    }
    made = {name: SimpleNamespace(**{**fields, **parts.pop(name, {})}) for name, fields in kinds.items()}
    return SimpleNamespace(**{"speculative_config": None, "lora_config": None, **made, **parts})


def refusal(**parts):
    return refused_engine(VLLMConfig(), configured(**parts), SimpleNamespace(kv_cache_groups=[]))


def test_an_ordinary_engine_is_not_refused():
    assert refusal() == ""


def test_drafts_that_have_no_kv_are_not_refused():
    assert refusal(speculative_config=NGRAM) == ""


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"parallel_config": {"pipeline_parallel_size": 2}}, "pipeline parallelism"),
        ({"parallel_config": {"data_parallel_size": 2}}, "data parallelism"),
        ({"parallel_config": {"decode_context_parallel_size": 2}}, "context parallelism"),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, "speculative decoding"),
        ({"speculative_config": SimpleNamespace(method="ngram_gpu")}, "ngram and suffix alone"),
        ({"speculative_config": NGRAM, "scheduler_config": {"async_scheduling": True}}, "ngram and suffix alone"),
        ({"speculative_config": NGRAM, "use_v2_model_runner": True}, "ngram and suffix alone"),
        ({"lora_config": object()}, "LoRA"),
        (
            {"cache_config": {"cache_dtype": "fp8_per_token_head"}},
            "fp8_per_token_head is not supported; use auto or fp8",
        ),
        ({"cache_config": {"cache_dtype": "turboquant_k8v4"}}, "use auto or fp8"),
        ({"model_config": {"is_encoder_decoder": True}}, "encoder-decoder"),
        ({"model_config": {"runner_type": "pooling"}}, "pooling models"),
        ({"aux_output_config": {"enabled": True}}, "routed_experts"),
    ],
)
def test_what_grafts_would_get_wrong_is_refused_by_name(parts, words):
    assert words in refusal(**parts)
