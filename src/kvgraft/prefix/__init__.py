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
from kvgraft.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog, KVEvent
from kvgraft.prefix.eviction import EVICTION_POLICIES, EvictionKey, EvictionPolicy, make_eviction_policy
from kvgraft.prefix.key import RadixKey
from kvgraft.prefix.radix import RadixCache
from kvgraft.prefix.request import CacheRequest
from kvgraft.prefix.semantic_prefix import SemanticPrefixProvider, SemanticPrefixResult
from kvgraft.prefix.swa import SWAInsertResult, SWAMatchResult, SWARadixCache
from kvgraft.prefix.swa_lifecycle import swa_frontier
from kvgraft.prefix.swa_node import SWALock

__all__ = [
    "EVICTION_POLICIES",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "CacheRequest",
    "EventLog",
    "EvictResult",
    "EvictionKey",
    "EvictionPolicy",
    "FidelitySpan",
    "InsertResult",
    "KVEvent",
    "MatchPrefixParams",
    "MatchResult",
    "PrefixCache",
    "PrefixHandle",
    "RadixCache",
    "RadixKey",
    "SWAInsertResult",
    "SWALock",
    "SWAMatchResult",
    "SWARadixCache",
    "SemanticPrefixProvider",
    "SemanticPrefixResult",
    "SlotArray",
    "make_eviction_policy",
    "swa_frontier",
]
