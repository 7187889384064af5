"""Exact prefix caches: which KV slots hold a prompt's first tokens. Needs numpy alone and touches no KV."""

from __future__ import annotations

from kvgraft.prefix.base import (
    EvictResult,
    FidelitySpan,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PrefixCache,
    PrefixHandle,
    SlotArray,
)
from kvgraft.prefix.chunk import ChunkCache, SWAChunkCache
from kvgraft.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, KVEvent
from kvgraft.prefix.eviction import EVICTION_POLICIES, EvictionKey, EvictionPolicy, make_eviction_policy
from kvgraft.prefix.hierarchical import (
    WRITE_POLICIES,
    HierarchicalRadixCache,
    LoadBack,
    LoadBackResult,
    TierTransfer,
)
from kvgraft.prefix.key import RadixKey
from kvgraft.prefix.radix import RadixCache
from kvgraft.prefix.registry import (
    RadixCacheFactory,
    TreeCacheBuildContext,
    create_tree_cache,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from kvgraft.prefix.request import CacheRequest
from kvgraft.prefix.semantic_prefix import SemanticPrefixProvider, SemanticPrefixResult
from kvgraft.prefix.session import StreamingSession
from kvgraft.prefix.swa import SWAInsertResult, SWAMatchResult, SWARadixCache
from kvgraft.prefix.swa_lifecycle import swa_frontier
from kvgraft.prefix.swa_node import SWALock

__all__ = [
    "EVICTION_POLICIES",
    "WRITE_POLICIES",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheRequest",
    "ChunkCache",
    "EventLog",
    "EvictResult",
    "EvictionKey",
    "EvictionPolicy",
    "FidelitySpan",
    "HierarchicalRadixCache",
    "InsertResult",
    "KVEvent",
    "LoadBack",
    "LoadBackResult",
    "MatchPrefixParams",
    "MatchResult",
    "PrefixCache",
    "PrefixHandle",
    "RadixCache",
    "RadixCacheFactory",
    "RadixKey",
    "SWAChunkCache",
    "SWAInsertResult",
    "SWALock",
    "SWAMatchResult",
    "SWARadixCache",
    "SemanticPrefixProvider",
    "SemanticPrefixResult",
    "SlotArray",
    "StreamingSession",
    "TierTransfer",
    "TreeCacheBuildContext",
    "create_tree_cache",
    "default_radix_cache_factory",
    "get_radix_cache_factory",
    "make_eviction_policy",
    "register_radix_cache_backend",
    "registered_radix_cache_backends",
    "swa_frontier",
]
