"""What a request asks for, and what of that cannot be had."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from vllm.v1.request import Request

PARAMETER = "kvgraft"
"""Key of our part of `kv_transfer_params`, in requests and in responses."""


def asked_mode(request: Request, default: str) -> tuple[ReuseMode, str]:
    """Return what the request asks for, and what is wrong with that; a wrong value reuses nothing."""
    given = (request.kv_transfer_params or {}).get(PARAMETER, default)
    try:
        return ReuseMode(given), ""
    except ValueError:
        return ReuseMode.OFF, f"kv_transfer_params[{PARAMETER!r}] must be off, exact or graft, not {given!r}"


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
