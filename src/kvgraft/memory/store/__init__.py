"""Stores of KV blocks outside the pool, one file per medium. Needs torch."""

from __future__ import annotations

from kvgraft.memory.store.base import KVStore, StoreKey
from kvgraft.memory.store.host import HostKVStore
from kvgraft.memory.store.registry import StoreFactory, create_store, register_store

__all__ = ["HostKVStore", "KVStore", "StoreFactory", "StoreKey", "create_store", "register_store"]
