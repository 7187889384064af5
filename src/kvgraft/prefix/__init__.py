"""Exact prefix caches: which KV slots hold a prompt's first tokens. Needs numpy alone and touches no KV.

Public modules: `eviction.policies`, for the policies themselves, `events.log`, `events.publisher` and `events.wire`.
"""

from __future__ import annotations

from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.context import PoolFacts, TreeCacheBuildContext
from kvgraft.prefix.events.event import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from kvgraft.prefix.events.log import EventLog
from kvgraft.prefix.events.publisher import PublisherConfig, ZmqEventPublisher, ZmqEventSubscriber
from kvgraft.prefix.events.wire import EventBatch, as_map, decode_batch, encode_batch
from kvgraft.prefix.eviction.policies import EVICTION_POLICIES, EvictionKey, EvictionPolicy, make_eviction_policy
from kvgraft.prefix.hierarchical.cache import HierarchicalRadixCache
from kvgraft.prefix.hierarchical.transfer import WRITE_POLICIES, LoadBack, LoadBackResult, TierTransfer
from kvgraft.prefix.hierarchical_ssm.cache import HierarchicalStateCache
from kvgraft.prefix.hierarchical_ssm.results import TieredStateMatchResult
from kvgraft.prefix.key import RadixKey, UnannouncedKey, frozen_tokens
from kvgraft.prefix.radix.base import BaseRadixCache
from kvgraft.prefix.radix.cache import RadixCache
from kvgraft.prefix.registry import (
    RadixCacheFactory,
    create_tree_cache,
    default_radix_cache_factory,
    get_radix_cache_factory,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from kvgraft.prefix.results import (
    EvictResult,
    FidelitySpan,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    OutlineNode,
    PrefixHandle,
    SlotArray,
    StoredLength,
)
from kvgraft.prefix.semantic import (
    GuardedProvider,
    SemanticCounters,
    SemanticPrefixProvider,
    SemanticPrefixResult,
    load_provider,
    provider_class,
)
from kvgraft.prefix.ssm.cache import StateRadixCache
from kvgraft.prefix.ssm.node import StateLock
from kvgraft.prefix.ssm.recording import (
    BranchingPoints,
    EndOfPrompt,
    EveryTokens,
    RecordingPrompt,
    StateRecording,
    affordable_states,
)
from kvgraft.prefix.ssm.results import StateInsertResult, StateMatchResult
from kvgraft.prefix.standalone.chunk import ChunkCache, SWAChunkCache
from kvgraft.prefix.standalone.lifecycle import StoredRow
from kvgraft.prefix.standalone.request import RequestRow
from kvgraft.prefix.standalone.sessions import StreamingSession
from kvgraft.prefix.swa.cache import SWARadixCache
from kvgraft.prefix.swa.node import SWALock
from kvgraft.prefix.swa.results import SWAInsertResult, SWAMatchResult

__all__ = [
    "EVICTION_POLICIES",
    "WRITE_POLICIES",
    "AllBlocksCleared",
    "BaseRadixCache",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "BranchingPoints",
    "ChunkCache",
    "EndOfPrompt",
    "EventBatch",
    "EventLog",
    "EveryTokens",
    "EvictResult",
    "EvictionKey",
    "EvictionPolicy",
    "FidelitySpan",
    "GuardedProvider",
    "HierarchicalRadixCache",
    "HierarchicalStateCache",
    "InsertResult",
    "KVEvent",
    "LoadBack",
    "LoadBackResult",
    "MatchPrefixParams",
    "MatchResult",
    "OutlineNode",
    "PoolFacts",
    "PrefixCache",
    "PrefixHandle",
    "PublisherConfig",
    "RadixCache",
    "RadixCacheFactory",
    "RadixKey",
    "RecordingPrompt",
    "RequestRow",
    "SWAChunkCache",
    "SWAInsertResult",
    "SWALock",
    "SWAMatchResult",
    "SWARadixCache",
    "SemanticCounters",
    "SemanticPrefixProvider",
    "SemanticPrefixResult",
    "SlotArray",
    "StateInsertResult",
    "StateLock",
    "StateMatchResult",
    "StateRadixCache",
    "StateRecording",
    "StoredLength",
    "StoredRow",
    "StreamingSession",
    "TierTransfer",
    "TieredStateMatchResult",
    "TreeCacheBuildContext",
    "UnannouncedKey",
    "ZmqEventPublisher",
    "ZmqEventSubscriber",
    "affordable_states",
    "as_map",
    "create_tree_cache",
    "decode_batch",
    "default_radix_cache_factory",
    "encode_batch",
    "frozen_tokens",
    "get_radix_cache_factory",
    "load_provider",
    "make_eviction_policy",
    "provider_class",
    "register_radix_cache_backend",
    "registered_radix_cache_backends",
]
