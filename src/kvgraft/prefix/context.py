"""What a factory of prefix caches is told: the model, its pools of slots, and every setting that concerns a cache.

Source: names follow SGLang pull request #25101. What hangs off `server_args`, `params` and `tp_worker` there stands here by
itself, as plain values: a factory needs no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.prefix.events.log import EventLog
    from kvgraft.prefix.hierarchical.transfer import TierTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """A pool of K/V slots, one per token. It is allocated behind the cache, which decides what pools there are.

    Attributes:
        num_slots: Tokens that it holds.
        bytes_per_token: Bytes of K/V that a slot holds, all layers of the pool together.
        dtype: Of keys and values: `float32`, `bfloat16`, ...
        device: Where they lie: `cpu`, `cuda:0`, ...
    """

    num_slots: int
    bytes_per_token: int
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """What a factory may know. Fields that a cache does not use are ignored by it.

    The embedded engine fills all of them; what it says beyond the defaults is noted.

    Attributes:
        page_size: Tokens per page.
        backend: Name of a registered factory; None for the default chain.
        model_name: Name of the model, for logs.
        model_config: Configuration of the model: for the embedded engine the text part of a transformers configuration.
        num_layers: Attention layers.
        pool: What a cache of one pool gets. None where nobody says.
        full_pool: What `SWARadixCache` gets for full-attention layers; None for models without sliding windows.
        swa_pool: What `SWARadixCache` gets for sliding-window layers; None for models without.
        tp_size: Tensor-parallel ranks; 1 in the embedded engine.
        tp_rank: Which of them this process is.
        disable_radix_cache: Reuse nothing. Never in the embedded engine, whose requests say so one by one.
        effective_chunked_prefill_size: Most tokens per prefill chunk, None without chunks.
        sliding_window_size: Window of a hybrid model, the largest if there are several; this or the next one is needed where
            `is_hybrid_swa`.
        attention_chunk_size: Chunk of a hybrid model whose window layers read the tokens of their own chunk (Llama 4).
        is_hybrid_swa: Whether the model has full and sliding-window layers, and slots for each.
        is_all_swa: Whether the model has sliding-window layers only.
        is_hybrid_ssm: Whether the model has state-space layers. Never in the embedded engine, which refuses them.
        use_native_tree: Ask for a tree in native code.
        use_unified_tree: Ask for the component tree; ours serves full and sliding-window attention.
        external_backend: Cache service outside the process, such as LMCache.
        enable_hierarchical_cache: Keep evicted KV in a host tier.
        tier_transfer: Moves KV between tiers; needed where `enable_hierarchical_cache`.
        host_write_policy: `write_through` or `write_back`.
        enable_streaming_session: Keep sessions of clients that append turn by turn.
        eviction_policy: Name in `EVICTION_POLICIES`.
        eviction_policy_config: Its parameters.
        events: Where stored and removed pages are recorded; None where nobody listens.
        options: For third-party factories: the setting `radix_cache_options`.
    """

    page_size: int = 1
    backend: str | None = None
    model_name: str = ""
    model_config: object = None
    num_layers: int = 0
    pool: PoolFacts | None = None
    full_pool: PoolFacts | None = None
    swa_pool: PoolFacts | None = None
    tp_size: int = 1
    tp_rank: int = 0
    disable_radix_cache: bool = False
    effective_chunked_prefill_size: int | None = None
    sliding_window_size: int | None = None
    attention_chunk_size: int | None = None
    is_hybrid_swa: bool = False
    is_all_swa: bool = False
    is_hybrid_ssm: bool = False
    use_native_tree: bool = False
    use_unified_tree: bool = False
    external_backend: str | None = None
    enable_hierarchical_cache: bool = False
    tier_transfer: TierTransfer | None = None
    host_write_policy: str = "write_through"
    enable_streaming_session: bool = False
    eviction_policy: str = "lru"
    eviction_policy_config: Mapping[str, int] = field(default_factory=dict)
    events: EventLog | None = None
    options: Mapping[str, object] = field(default_factory=dict)
