"""Exact prefix caches: which KV slots hold a prompt's first tokens. Needs numpy alone and touches no KV.

Public module: `eviction.policies`, for the policies themselves. `kvgraft.events` announces what is stored and removed,
`kvgraft.token_key` names a prompt's key, and `kvgraft.substitution` lets other texts stand in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.on_use import names_on_use

if TYPE_CHECKING:
    from kvgraft.prefix.base import PrefixCache
    from kvgraft.prefix.context import PoolFacts, TreeCacheBuildContext
    from kvgraft.prefix.eviction.policies import EVICTION_POLICIES, EvictionKey, EvictionPolicy, make_eviction_policy
    from kvgraft.prefix.hierarchical.cache import HierarchicalRadixCache
    from kvgraft.prefix.hierarchical.states import HierarchicalStateCache, TieredStateMatchResult
    from kvgraft.prefix.hierarchical.transfer import WRITE_POLICIES, LoadBack, LoadBackResult, TierTransfer
    from kvgraft.prefix.lifecycle import StoredRow
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
    from kvgraft.prefix.request import RequestRow
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
    from kvgraft.prefix.ssm.cache import StateRadixCache
    from kvgraft.prefix.ssm.recording import (
        BranchingPoints,
        EndOfPrompt,
        EveryTokens,
        RecordingPrompt,
        StateRecording,
        affordable_states,
    )
    from kvgraft.prefix.ssm.state import StateInsertResult, StateLock, StateMatchResult
    from kvgraft.prefix.standalone.chunk import ChunkCache, SWAChunkCache
    from kvgraft.prefix.standalone.sessions import StreamingSession
    from kvgraft.prefix.swa.cache import SWARadixCache
    from kvgraft.prefix.swa.window import SWAInsertResult, SWALock, SWAMatchResult
    from kvgraft.token_key import RadixKey, UnannouncedKey, frozen_tokens

__all__ = [
    "EVICTION_POLICIES",
    "WRITE_POLICIES",
    "BaseRadixCache",
    "BranchingPoints",
    "ChunkCache",
    "EndOfPrompt",
    "EveryTokens",
    "EvictResult",
    "EvictionKey",
    "EvictionPolicy",
    "FidelitySpan",
    "HierarchicalRadixCache",
    "HierarchicalStateCache",
    "InsertResult",
    "LoadBack",
    "LoadBackResult",
    "MatchPrefixParams",
    "MatchResult",
    "OutlineNode",
    "PoolFacts",
    "PrefixCache",
    "PrefixHandle",
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
    "affordable_states",
    "create_tree_cache",
    "default_radix_cache_factory",
    "frozen_tokens",
    "get_radix_cache_factory",
    "make_eviction_policy",
    "register_radix_cache_backend",
    "registered_radix_cache_backends",
]

__getattr__ = names_on_use(
    __name__,
    {
        "BaseRadixCache": "kvgraft.prefix.radix.base",
        "BranchingPoints": "kvgraft.prefix.ssm.recording",
        "ChunkCache": "kvgraft.prefix.standalone.chunk",
        "EVICTION_POLICIES": "kvgraft.prefix.eviction.policies",
        "EndOfPrompt": "kvgraft.prefix.ssm.recording",
        "EveryTokens": "kvgraft.prefix.ssm.recording",
        "EvictResult": "kvgraft.prefix.results",
        "EvictionKey": "kvgraft.prefix.eviction.policies",
        "EvictionPolicy": "kvgraft.prefix.eviction.policies",
        "FidelitySpan": "kvgraft.prefix.results",
        "HierarchicalRadixCache": "kvgraft.prefix.hierarchical.cache",
        "HierarchicalStateCache": "kvgraft.prefix.hierarchical.states",
        "InsertResult": "kvgraft.prefix.results",
        "LoadBack": "kvgraft.prefix.hierarchical.transfer",
        "LoadBackResult": "kvgraft.prefix.hierarchical.transfer",
        "MatchPrefixParams": "kvgraft.prefix.results",
        "MatchResult": "kvgraft.prefix.results",
        "OutlineNode": "kvgraft.prefix.results",
        "PoolFacts": "kvgraft.prefix.context",
        "PrefixCache": "kvgraft.prefix.base",
        "PrefixHandle": "kvgraft.prefix.results",
        "RadixCache": "kvgraft.prefix.radix.cache",
        "RadixCacheFactory": "kvgraft.prefix.registry",
        "RadixKey": "kvgraft.token_key",
        "RecordingPrompt": "kvgraft.prefix.ssm.recording",
        "RequestRow": "kvgraft.prefix.request",
        "SWAChunkCache": "kvgraft.prefix.standalone.chunk",
        "SWAInsertResult": "kvgraft.prefix.swa.window",
        "SWALock": "kvgraft.prefix.swa.window",
        "SWAMatchResult": "kvgraft.prefix.swa.window",
        "SWARadixCache": "kvgraft.prefix.swa.cache",
        "SlotArray": "kvgraft.prefix.results",
        "StateInsertResult": "kvgraft.prefix.ssm.state",
        "StateLock": "kvgraft.prefix.ssm.state",
        "StateMatchResult": "kvgraft.prefix.ssm.state",
        "StateRadixCache": "kvgraft.prefix.ssm.cache",
        "StateRecording": "kvgraft.prefix.ssm.recording",
        "StoredLength": "kvgraft.prefix.results",
        "StoredRow": "kvgraft.prefix.lifecycle",
        "StreamingSession": "kvgraft.prefix.standalone.sessions",
        "TierTransfer": "kvgraft.prefix.hierarchical.transfer",
        "TieredStateMatchResult": "kvgraft.prefix.hierarchical.states",
        "TreeCacheBuildContext": "kvgraft.prefix.context",
        "UnannouncedKey": "kvgraft.token_key",
        "WRITE_POLICIES": "kvgraft.prefix.hierarchical.transfer",
        "affordable_states": "kvgraft.prefix.ssm.recording",
        "create_tree_cache": "kvgraft.prefix.registry",
        "default_radix_cache_factory": "kvgraft.prefix.registry",
        "frozen_tokens": "kvgraft.token_key",
        "get_radix_cache_factory": "kvgraft.prefix.registry",
        "make_eviction_policy": "kvgraft.prefix.eviction.policies",
        "register_radix_cache_backend": "kvgraft.prefix.registry",
        "registered_radix_cache_backends": "kvgraft.prefix.registry",
    },
)
