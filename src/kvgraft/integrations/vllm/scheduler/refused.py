"""Requests that are neither grafted nor captured, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def refused_request(request: Request) -> str:
    """Say why a request is neither grafted nor captured, or return an empty text."""
    if request.lora_request is not None:
        return "LoRA requests are not grafted"
    if request.mm_features:
        return "requests with images or audio are not grafted"
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "requests with prompt embeddings are not grafted"
    if getattr(request, "skip_reading_prefix_cache", False):
        return "the request asks not to read caches (prompt_logprobs do so)"
    return ""
