"""KV memory: who holds which slot (numpy alone), the bytes of the slots and stores of blocks (torch, loaded on use)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvgraft.memory.allocator import Owner, SlotAllocator, SlotUsage
from kvgraft.memory.extents import SlotArray

if TYPE_CHECKING:
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.hybrid_pool import HybridSlotPool
    from kvgraft.memory.pool import KVPlace, KVPool, LayerShape, SlotIndex, SlotPool, as_index
    from kvgraft.memory.store import HostKVStore, KVStore, StoreFactory, StoreKey, create_store, register_store

__all__ = [
    "HostKVStore",
    "HybridSlotPool",
    "KVBlock",
    "KVPlace",
    "KVPool",
    "KVStore",
    "LayerShape",
    "Owner",
    "SlotAllocator",
    "SlotArray",
    "SlotIndex",
    "SlotPool",
    "SlotUsage",
    "StoreFactory",
    "StoreKey",
    "as_index",
    "create_store",
    "register_store",
]

_NEEDS_TORCH = {
    "HostKVStore": "kvgraft.memory.store",
    "HybridSlotPool": "kvgraft.memory.hybrid_pool",
    "KVBlock": "kvgraft.memory.block",
    "KVPlace": "kvgraft.memory.pool",
    "KVPool": "kvgraft.memory.pool",
    "KVStore": "kvgraft.memory.store",
    "LayerShape": "kvgraft.memory.pool",
    "SlotIndex": "kvgraft.memory.pool",
    "SlotPool": "kvgraft.memory.pool",
    "StoreFactory": "kvgraft.memory.store",
    "StoreKey": "kvgraft.memory.store",
    "as_index": "kvgraft.memory.pool",
    "create_store": "kvgraft.memory.store",
    "register_store": "kvgraft.memory.store",
}


def __getattr__(name: str) -> object:
    """Import what needs torch when it is first asked for."""
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_NEEDS_TORCH[name])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(f"{__name__}.{name} needs torch: pip install 'kvgraft[torch]'") from error
    return getattr(module, name)
