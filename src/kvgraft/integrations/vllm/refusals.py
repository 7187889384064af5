"""Engines that the connector does not graft for, and why. They serve as if the connector were not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvgraft.graft.rope_proof import refused_rope_parameters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

    from kvgraft.config.vllm import VLLMConfig

_DRAFTS_FROM_TEXT = frozenset({"ngram", "suffix"})
"""Methods of speculative decoding that draft from text alone."""

_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


def refused_engine(config: VLLMConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return why nothing may be grafted on this engine, or an empty text."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    reasons = {
        "pooling models are not supported: their answers come from every position": (
            getattr(model, "runner_type", "generate") == "pooling"
        ),
        "enable_return_routed_experts is not supported: these come from every position": bool(
            getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False)
        ),
        "pipeline parallelism is not supported": parallel.pipeline_parallel_size > 1,
        # Of dense models vLLM runs independent engines, each of which sees a size of 1.
        "data parallelism is not supported for models with experts": parallel.data_parallel_size > 1,
        "context parallelism is not supported": parallel.decode_context_parallel_size > 1,
        "speculative decoding is supported with the methods ngram and suffix alone, which keep no K/V of their own": (
            _drafts_with_kv(vllm_config)
        ),
        "LoRA is not supported: gaps are computed outside the batch that adapters are chosen for": (
            vllm_config.lora_config is not None
        ),
        f"a KV cache of type {vllm_config.cache_config.cache_dtype} is not supported; use auto or fp8": (
            vllm_config.cache_config.cache_dtype not in _CACHE_DTYPES
        ),
        "encoder-decoder models are not supported": bool(getattr(model, "is_encoder_decoder", False)),
    }
    refused = [reason for reason, holds in reasons.items() if holds]
    return "; ".join(refused) or _refused_rope(vllm_config) or _refused_groups(config, kv_cache_config)


def _drafts_with_kv(vllm_config: VllmConfig) -> bool:
    """Whether drafts come from something that has K/V, or are taken for accepted before they are verified.

    Asynchronous scheduling does the latter, and Model Runner V2 was not tried.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return False
    is_early = vllm_config.scheduler_config.async_scheduling or getattr(vllm_config, "use_v2_model_runner", False)
    return bool(is_early) or speculative.method not in _DRAFTS_FROM_TEXT


def refused_spec(spec: KVCacheSpec) -> str | None:
    """Return why K/V of layers like this may not be grafted, or None.

    By exact type: vLLM derives layers from these two that attend otherwise (R-SWA, static sinks, MLA with a window). With its
    hybrid allocator off, layers of chunked attention (Llama 4) come as full ones that say so.
    """
    if type(spec) not in {FullAttentionSpec, SlidingWindowSpec}:
        return f"layers of kind {type(spec).__name__} are not supported"
    if getattr(spec, "attention_chunk_size", None):
        return "layers with chunked attention are not supported"
    if getattr(spec, "non_causal", False):
        return "layers that attend to later tokens are not supported"
    return None


def _refused_rope(vllm_config: VllmConfig) -> str:
    config = vllm_config.model_config.hf_text_config
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return refused_rope_parameters(parameters) or ""


def _refused_groups(config: VLLMConfig, kv_cache_config: KVCacheConfig) -> str:
    groups = kv_cache_config.kv_cache_groups
    for group in groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec}).values()
        for spec in specs:
            if (reason := refused_spec(spec)) is not None:
                return reason
    windowed = any(isinstance(group.kv_cache_spec, SlidingWindowSpec) for group in groups)
    if config.selection == "kv_deviation" and (windowed or len(groups) > 1):
        return "selection 'kv_deviation' is not supported on models with sliding windows; use 'first_k'"
    return ""
