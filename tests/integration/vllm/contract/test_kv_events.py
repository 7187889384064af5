"""KV events of `kvgraft.prefix` are read by vLLM's own reader."""

from __future__ import annotations

import msgspec
from vllm.distributed.kv_events import KVEventBatch

from kvgraft.prefix import AllBlocksCleared, BlockRemoved, BlockStored
from kvgraft.prefix.events.wire import EventBatch, encode_batch


def test_vllm_reads_what_we_write():
    events = (
        BlockStored((11, 12), None, (1, 2, 3, 4), 2, medium="GPU", lora_name="adapter"),
        BlockStored((13,), 12, (5, 6), 2),
        BlockRemoved((11,)),
        AllBlocksCleared(),
    )
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(encode_batch(EventBatch(1.5, events, 3)))
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 3)
    first, second, removed, cleared = batch.events
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([11, 12], None, [1, 2, 3, 4])
    assert (first.block_size, first.medium, first.lora_name) == (2, "GPU", "adapter")
    assert (second.parent_block_hash, second.medium, second.lora_name) == (12, None, None)
    assert removed.block_hashes == [11]
    assert type(cleared).__name__ == "AllBlocksCleared"
