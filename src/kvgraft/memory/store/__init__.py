"""Stores of KV blocks outside the pool, one file per medium. Needs torch."""

from __future__ import annotations

from kvgraft.memory.store.base import KVStore, StoreKey
from kvgraft.memory.store.host import HostKVStore

__all__ = ["HostKVStore", "KVStore", "StoreKey"]
