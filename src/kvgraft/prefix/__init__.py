"""Exact prefix caches: which KV slots hold a prompt's first tokens. Needs numpy alone and touches no KV."""

from __future__ import annotations

from kvgraft.prefix.base import EvictResult, InsertResult, MatchResult, PrefixCache, PrefixHandle, SlotArray
from kvgraft.prefix.eviction import EvictionKey, EvictionPolicy, least_recently_used
from kvgraft.prefix.key import RadixKey
from kvgraft.prefix.radix import RadixCache

__all__ = [
    "EvictResult",
    "EvictionKey",
    "EvictionPolicy",
    "InsertResult",
    "MatchResult",
    "PrefixCache",
    "PrefixHandle",
    "RadixCache",
    "RadixKey",
    "SlotArray",
    "least_recently_used",
]
