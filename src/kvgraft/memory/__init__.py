"""KV memory: who holds which slot (numpy alone), bytes of slots, blocks in host memory and stores (torch, loaded on use).

Public modules: `configured`, `host_memory`, `packed`, `page_lock`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.on_use import names_on_use

if TYPE_CHECKING:
    from kvgraft.memory.allocator import Owner, SlotAllocator, SlotUsage
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.extents import SlotArray
    from kvgraft.memory.host_slots import BaseHostSlots, HostSlots
    from kvgraft.memory.host_states import HostStates
    from kvgraft.memory.host_store import HostKVStore, StoreKey
    from kvgraft.memory.hybrid_pool import HybridSlotPool
    from kvgraft.memory.pool import KVPlace, KVPool, LayerShape, SlotIndex, SlotPlace, SlotPool, as_index
    from kvgraft.memory.state_pool import StateBlock, StatePart, StatePool
    from kvgraft.memory.store import KVStore, StoreFactory, open_stores, register_store

__all__ = [
    "BaseHostSlots",
    "HostKVStore",
    "HostSlots",
    "HostStates",
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
    "SlotPlace",
    "SlotPool",
    "SlotUsage",
    "StateBlock",
    "StatePart",
    "StatePool",
    "StoreFactory",
    "StoreKey",
    "as_index",
    "open_stores",
    "register_store",
]

__getattr__ = names_on_use(
    __name__,
    {
        "BaseHostSlots": "kvgraft.memory.host_slots",
        "HostKVStore": "kvgraft.memory.host_store",
        "HostSlots": "kvgraft.memory.host_slots",
        "HostStates": "kvgraft.memory.host_states",
        "HybridSlotPool": "kvgraft.memory.hybrid_pool",
        "KVBlock": "kvgraft.memory.block",
        "KVPlace": "kvgraft.memory.pool",
        "KVPool": "kvgraft.memory.pool",
        "KVStore": "kvgraft.memory.store",
        "LayerShape": "kvgraft.memory.pool",
        "Owner": "kvgraft.memory.allocator",
        "SlotAllocator": "kvgraft.memory.allocator",
        "SlotArray": "kvgraft.memory.extents",
        "SlotIndex": "kvgraft.memory.pool",
        "SlotPlace": "kvgraft.memory.pool",
        "SlotPool": "kvgraft.memory.pool",
        "SlotUsage": "kvgraft.memory.allocator",
        "StateBlock": "kvgraft.memory.state_pool",
        "StatePart": "kvgraft.memory.state_pool",
        "StatePool": "kvgraft.memory.state_pool",
        "StoreFactory": "kvgraft.memory.store",
        "StoreKey": "kvgraft.memory.host_store",
        "as_index": "kvgraft.memory.pool",
        "open_stores": "kvgraft.memory.store",
        "register_store": "kvgraft.memory.store",
    },
)
