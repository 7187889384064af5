"""Requests that are neither grafted nor captured, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def is_session(request: Request) -> bool:
    """Return whether a request goes on with further input, which may take the place of tokens that it has drawn."""
    return bool(getattr(request, "resumable", False))


def refused_request(request: Request) -> str:
    """Return why a request is neither grafted nor captured, or an empty text."""
    if request.lora_request is not None:
        return "LoRA requests are not grafted"
    if request.mm_features:
        return "requests with images or audio are not grafted"
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "requests with prompt embeddings are not grafted"
    if getattr(request, "pooling_params", None) is not None:
        return "pooling requests are not grafted: their answers come from every position"
    if getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None:
        return "requests with prompt_logprobs are not grafted: these come from every position"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "the request asks not to read caches"
    return ""
