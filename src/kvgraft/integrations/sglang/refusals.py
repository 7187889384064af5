"""Servers and requests without reuse, and why. Everything unknown is refused."""

from __future__ import annotations

from typing import Any

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Decoders that rotate the keys of every layer.

Llama and Qwen3 are served in tests/integration/sglang/; Mistral and Qwen2 must pass the same start-up check, but no server
of them was run.
"""

_OF_EVERY_POSITION = {
    "return_hidden_states": "hidden states",
    "return_routed_experts": "routed experts",
    "return_indexer_topk": "the choice of sparse attention",
}
"""Fields of a request that ask for something of all its tokens."""

_PLAIN_DTYPES = ("torch.float32", "torch.float16", "torch.bfloat16")


def refused_server(ctx: Any) -> str | None:  # noqa: ANN401 - a class of SGLang
    """Return why reuse stays off in a server, or None.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.
    """
    checks = (_refused_tree, _refused_options, _refused_model, _refused_pool)
    return next((reason for check in checks if (reason := check(ctx)) is not None), None)


def refused_request(req: Any) -> str | None:  # noqa: ANN401 - a class of SGLang
    """Return why nothing is loaded for a request, or None. A function of the request alone, the same on all ranks."""
    if req.session is not None:
        return "it belongs to a session"
    if req.multimodal_inputs is not None:
        return "it has images, audio or video, whose positions are not token indices"
    if req.input_embeds is not None or req.positional_embed_overrides is not None:
        return "its embeddings are not those of its tokens"
    if getattr(req, "beam_group", None) is not None:
        return "it is a beam search"
    if getattr(req, "multi_item_delimiter_indices", None) is not None:
        return "its items do not attend to one another"
    return None


def refused_copies(req: Any) -> str | None:  # noqa: ANN401 - a class of SGLang
    """Return why a request is computed though its text may become a donor, or None; the same on all ranks.

    What it asks for is read off the prompt, where copies would show: off an answer they show as that of `graft`.
    """
    if req.return_logprob and 0 <= req.logprob_start_len < len(req.origin_input_ids):
        return "requests with log-probabilities of the prompt are not grafted: these come from every position"
    for name, words in _OF_EVERY_POSITION.items():
        if getattr(req, name, False):
            return f"requests with {words} are not grafted: these come from every position"
    if req.sampling_params.max_new_tokens == 0:
        return "requests for no token are not grafted: what they ask for comes from the prompt"
    return None


def refused_recomputation(ctx: Any) -> str | None:  # noqa: ANN401 - a class of SGLang
    """Return why forward passes of our own cannot be made in a server, or None."""
    args = ctx.server_args
    options = {
        "enable_lora": "--enable-lora, whose adapters are chosen per batch",
        "enable_dp_attention": "--enable-dp-attention, whose ranks must run every pass together",
        "enable_two_batch_overlap": "--enable-two-batch-overlap",
        "enable_pdmux": "--enable-pdmux",
    }
    for option, words in options.items():
        if getattr(args, option, None):
            return words
    if getattr(args, "lora_paths", None):
        return options["enable_lora"]
    decoder = getattr(ctx.tp_worker.model_runner.model, "model", None)
    return None if callable(decoder) else "a model whose decoder cannot be called by itself"


def _refused_tree(ctx: Any) -> str | None:  # noqa: ANN401
    if ctx.disable_radix_cache:
        return "--disable-radix-cache"
    if ctx.is_hybrid_swa:
        return "sliding-window or chunked layers"
    if ctx.is_hybrid_ssm:
        return "Mamba or linear-attention layers"
    if ctx.is_dsa:
        return "sparse attention with an index cache"
    if ctx.enable_hierarchical_cache:
        return "--enable-hierarchical-cache"
    return None


def _refused_options(ctx: Any) -> str | None:  # noqa: ANN401
    args, params = ctx.server_args, ctx.params
    options = {
        "speculative_algorithm": "speculative decoding",
        "dllm_algorithm": "diffusion language models",
        "enable_lmcache": "--enable-lmcache",
        "enable_unified_cache_external_linker": "an external cache linker",
        "enable_hisparse": "--enable-hisparse",
        "enable_streaming_session": "--enable-streaming-session",
        "enable_session_radix_cache": "--enable-session-radix-cache",
    }
    for option, words in options.items():
        if getattr(args, option, None):
            return words
    if getattr(args, "disaggregation_mode", "null") != "null":
        return "prefill and decode in separate servers"
    if params.pp_size > 1 or params.attn_cp_size > 1 or getattr(args, "dcp_size", 1) > 1:
        return "pipeline or context parallelism"
    if params.is_eagle:
        return "bigram keys"
    return None


def _refused_model(ctx: Any) -> str | None:  # noqa: ANN401
    config = ctx.model_config
    architecture = (getattr(config.hf_config, "architectures", None) or ["?"])[0]
    if not config.is_generation:
        return "not a generative model"
    if architecture not in SUPPORTED_ARCHITECTURES:
        return f"architecture {architecture} has not been checked"
    for layer in ctx.tp_worker.model_runner.model.modules():
        if type(layer).__name__ == "RadixAttention" and (reason := _refused_layer(layer)) is not None:
            return f"layer {layer.layer_id}: {reason}"
    return None


def _refused_layer(layer: Any) -> str | None:  # noqa: ANN401
    if layer.sliding_window_size != -1:
        return "sliding window"
    if layer.is_cross_attention or str(getattr(layer.attn_type, "value", layer.attn_type)) != "decoder":
        return "not causal self-attention"
    if layer.use_irope or layer.pos_encoding_mode != "NONE" or layer.xai_temperature_len > 0:
        return "positions enter the attention otherwise than by rotary keys"
    return None


def _refused_pool(ctx: Any) -> str | None:  # noqa: ANN401
    allocator = ctx.params.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    if type(pool).__name__ != "MHATokenToKVPool":
        return f"K/V pool {type(pool).__name__} (MLA, quantised and hybrid pools have another layout)"
    if str(pool.dtype) not in _PLAIN_DTYPES or pool.store_dtype != pool.dtype or pool.is_quantized_kv_cache:
        return f"K/V in {pool.dtype}, stored as {pool.store_dtype}"
    if pool.kv_cache_layout != "nhd":
        return f"K/V layout {pool.kv_cache_layout}"
    if type(allocator).__name__ not in ("TokenToKVPoolAllocator", "PagedTokenToKVPoolAllocator"):
        return f"allocator {type(allocator).__name__}"
    return None
