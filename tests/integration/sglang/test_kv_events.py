"""KV events of `kvgraft.prefix` are read by SGLang's own reader."""

from __future__ import annotations

import msgspec
from sglang.srt.disaggregation.kv_events import KVEventBatch

from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored
from kvgraft.events.wire import EventBatch, encode_batch


def test_sglang_reads_what_we_write():
    events = (
        BlockStored((11, 12), None, (1, 2, 3, 4), 2, medium="GPU", cache_salt="tenant"),
        BlockStored((13,), 12, (5, 6), 2),
        BlockRemoved((11,)),
        AllBlocksCleared(),
    )
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(encode_batch(EventBatch(1.5, events, 3)))
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 3)
    first, second, removed, cleared = batch.events
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([11, 12], None, [1, 2, 3, 4])
    assert (first.block_size, first.medium, first.cache_salt) == (2, "GPU", "tenant")
    assert (second.parent_block_hash, second.medium) == (12, None)
    assert removed.block_hashes == [11]
    assert type(cleared).__name__ == "AllBlocksCleared"
