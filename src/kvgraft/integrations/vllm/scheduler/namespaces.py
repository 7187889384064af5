"""Who may reuse what: the model as vLLM runs it, adapter, images and tenant of a request."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvgraft.types import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def model_fingerprint(vllm_config: VllmConfig) -> str:
    """Digest what decides K/V. Donors never leave the engine that loaded the weights, so these need no digest."""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    facts = {
        "model": str(model.model),
        "revision": str(model.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "config": model.hf_config.to_dict(),
    }
    raw = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(raw, digest_size=16, person=b"kvgraft.vllm").hexdigest()


def namespace_of(request: Request, fingerprint: str) -> Namespace:
    """Requests share text only if model, LoRA adapter, images and `cache_salt` are the same."""
    lora = request.lora_request
    adapter = [lora.lora_name, lora.lora_int_id, lora.lora_path] if lora is not None else []
    images = [feature.identifier for feature in request.mm_features]
    told = json.dumps([adapter, images]) if adapter or images else ""
    return Namespace(fingerprint, told, request.cache_salt or "")
