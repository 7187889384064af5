"""Facts of the engine for the scheduler's half, read from vLLM's configuration once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.utils.torch_utils import get_dtype_size
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kvgraft.config.stores import store_urls
from kvgraft.donors import GRAM_TOKENS
from kvgraft.integrations.vllm.refusals import refused_engine
from kvgraft.integrations.vllm.runner import takes_running_back
from kvgraft.integrations.vllm.scheduler import EngineFacts
from kvgraft.integrations.vllm.scheduler.namespaces import model_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvgraft.config.vllm import VLLMConfig

_OUTPUT_CHUNK = 64
"""Generated tokens are captured so many at a time: a copy per token would cost every decode step."""


def read_facts(config: VLLMConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineFacts:
    """Read the facts of an engine from its configuration."""
    refusal = refused_engine(config, vllm_config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    windows = [int(getattr(group.kv_cache_spec, "sliding_window", 0) or 0) for group in groups]
    host_tokens = 0 if refusal else config.host_bytes // bytes_per_token(kv_cache_config)
    capacity = config.donor_tokens if store_urls(config.store) else min(config.donor_tokens, host_tokens)
    if not refusal and min(capacity, host_tokens) < GRAM_TOKENS:
        refusal = f"host_bytes={config.host_bytes} hold no donor; raise it"
    return EngineFacts(
        model_fingerprint(vllm_config),
        tuple(group.kv_cache_spec.block_size for group in groups),
        resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1],
        max(windows, default=0),
        max(capacity, GRAM_TOKENS),
        vllm_config.model_config.get_hidden_size(),
        min([_OUTPUT_CHUNK, *(window for window in windows if window)]),
        refusal,
        vllm_config.model_config,
        host_tokens=max(min(host_tokens, capacity), GRAM_TOKENS),
        num_ranks=vllm_config.parallel_config.tensor_parallel_size,
        steps_under_way=vllm_config.max_concurrent_batches,
        takes_running_back=takes_running_back(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        max_num_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def bytes_per_token(kv_cache_config: KVCacheConfig) -> int:
    """Return the host memory of one token's K/V in all layers of a rank."""
    total = 0
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            total += 2 * spec.num_kv_heads * spec.head_size * get_dtype_size(spec.dtype)
    return total
