"""KV events: what is stored and removed, on the wire and over ZMQ as vLLM and SGLang send it.

Public modules: `log`, `publisher` and `wire`.
"""

from __future__ import annotations

from kvgraft.events.event import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent
from kvgraft.events.log import EventLog
from kvgraft.events.publisher import PublisherConfig, ZmqEventPublisher, ZmqEventSubscriber
from kvgraft.events.wire import EventBatch, as_map, decode_batch, encode_batch

__all__ = [
    "AllBlocksCleared",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventLog",
    "KVEvent",
    "PublisherConfig",
    "ZmqEventPublisher",
    "ZmqEventSubscriber",
    "as_map",
    "decode_batch",
    "encode_batch",
]
