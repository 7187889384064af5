"""Build context of prefix caches: the model, its pools of slots, and every setting that concerns a cache.

Source: names follow SGLang pull request #25101. What hangs off `server_args`, `params` and `tp_worker` there stands here by
itself, as plain values: a factory needs no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.events.log import EventLog
    from kvgraft.prefix.hierarchical.transfer import TierTransfer


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """A pool of K/V slots, one per token. It is allocated after the cache, which decides what pools there are."""

    num_slots: int
    bytes_per_token: int
    """Bytes of K/V that a slot holds, all layers of the pool together."""
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """Facts for a factory. Fields that a cache does not use are ignored by it.

    The embedded engine fills all of them; what it says beyond the defaults is noted.
    """

    page_size: int = 1
    backend: str | None = None
    """Name of a registered factory; None for the default chain."""
    model_name: str = ""
    """Name of the model, for logs."""
    model_config: object = None
    """Configuration of the model: for the embedded engine the text part of a transformers configuration."""
    num_layers: int = 0
    pool: PoolFacts | None = None
    """What a cache of one pool gets."""
    full_pool: PoolFacts | None = None
    """What `SWARadixCache` gets for full-attention layers; None for models without sliding windows."""
    swa_pool: PoolFacts | None = None
    """What `SWARadixCache` gets for sliding-window layers; None for models without."""
    tp_size: int = 1
    tp_rank: int = 0
    disable_radix_cache: bool = False
    """Reuse nothing. Never in the embedded engine: its requests say so one by one."""
    effective_chunked_prefill_size: int | None = None
    """Most tokens per prefill chunk, None without chunks."""
    sliding_window_size: int | None = None
    """Window of a hybrid model, the largest if there are several; this or the next one is needed where `is_hybrid_swa`."""
    attention_chunk_size: int | None = None
    """Chunk of a hybrid model with window layers that read the tokens of their own chunk (Llama 4)."""
    is_hybrid_swa: bool = False
    is_all_swa: bool = False
    is_hybrid_ssm: bool = False
    """Whether the model has state-space or linear-attention layers."""
    state_chunk_size: int = 1
    """Tokens per chunk of its linear attention, where `is_hybrid_ssm`: states are recorded at ends of chunks."""
    use_native_tree: bool = False
    use_unified_tree: bool = False
    """Ask for the component tree; ours serve full attention with sliding windows, or with states."""
    external_backend: str | None = None
    """Cache service outside the process, such as LMCache."""
    enable_hierarchical_cache: bool = False
    tier_transfer: TierTransfer | None = None
    """Moves KV between tiers; needed where `enable_hierarchical_cache`."""
    state_tier_transfer: TierTransfer | None = None
    """Moves states between tiers; needed besides where `is_hybrid_ssm`."""
    host_write_policy: str = "write_through"
    enable_streaming_session: bool = False
    """Keep sessions of clients that append turn by turn."""
    eviction_policy: str = "lru"
    """Name in `EVICTION_POLICIES`."""
    eviction_policy_config: Mapping[str, int] = field(default_factory=dict)
    events: EventLog | None = None
    """Where stored and removed pages are recorded; None to record nothing."""
    options: Mapping[str, object] = field(default_factory=dict)
    """For third-party factories: the setting `radix_cache_options`."""
