"""How an engine uses stores without ever waiting for one: threads write, read and look; the engine asks what has come."""

from __future__ import annotations

from kvgraft.memory.store.tier.feed import StoreFeed
from kvgraft.memory.store.tier.reader import Fetch, StoreReader
from kvgraft.memory.store.tier.speed import ReadSpeed
from kvgraft.memory.store.tier.tasks import TaskThreads
from kvgraft.memory.store.tier.touches import Touches
from kvgraft.memory.store.tier.used import UsedStore
from kvgraft.memory.store.tier.writer import StoreWriter, Written

__all__ = [
    "Fetch",
    "ReadSpeed",
    "StoreFeed",
    "StoreReader",
    "StoreWriter",
    "TaskThreads",
    "Touches",
    "UsedStore",
    "Written",
]
