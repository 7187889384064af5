"""Namespaces of requests: the model as vLLM runs it, adapter, images and tenant."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from kvgraft.types import Namespace

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def model_fingerprint(vllm_config: VllmConfig) -> str:
    """Digest the architecture, as any replica sees it: where the model lies on this machine is left out.

    Weights need no digest here. In host memory donors never leave the engine that loaded them, and in stores they lie in a
    space that is named by the weights (`worker/space.py`).
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    config = {name: value for name, value in model.hf_config.to_dict().items() if name != "_name_or_path"}
    facts = {
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "config": config,
    }
    raw = json.dumps(facts, sort_keys=True, default=str).encode()
    return hashlib.blake2b(raw, digest_size=16, person=b"kvgraft.vllm").hexdigest()


def namespace_of(request: Request, fingerprint: str) -> Namespace:
    """Return the namespace of a request: its model, LoRA adapter, images and `cache_salt`."""
    lora = request.lora_request
    adapter = [lora.lora_name, lora.lora_int_id, lora.lora_path] if lora is not None else []
    images = [feature.identifier for feature in request.mm_features]
    own = json.dumps([adapter, images]) if adapter or images else ""
    return Namespace(fingerprint, own, request.cache_salt or "")
