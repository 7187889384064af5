"""KV events of `kvgraft.prefix` are read by vLLM's own reader."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved as TheirRemoved
from vllm.distributed.kv_events import BlockStored as TheirStored
from vllm.distributed.kv_events import KVEventBatch

from kvgraft.donors import DonorCatalogue
from kvgraft.errors import ConfigError
from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvgraft.events.wire import EventBatch, encode_batch
from kvgraft.integrations.vllm.donor_events import announce, as_vllms
from kvgraft.reuse.donor_events import DONOR_PARENT, donor_removed, donor_stored, is_donor, scope_of
from kvgraft.router.chains import scope_of_pages
from kvgraft.types import Namespace


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


def test_events_become_vllms_own_without_loss():
    stored = BlockStored((11,), 7, (1, 2), 2, medium="CPU", extra_keys=(("a", "b"),), locality="LOCAL", ownership="x")
    theirs = as_vllms(stored)
    assert isinstance(theirs, TheirStored)
    assert (theirs.block_hashes, theirs.parent_block_hash, theirs.token_ids, theirs.block_size) == ([11], 7, [1, 2], 2)
    assert as_vllms(BlockRemoved((11,), "CPU")) == TheirRemoved(block_hashes=[11], medium="CPU")
    assert type(as_vllms(AllBlocksCleared())).__name__ == "AllBlocksCleared"


def test_donors_are_told_of_as_vllm_publishes_them():
    """From the catalogue through vLLM's types and its encoding to our reader, which knows them for donors."""
    told = []
    catalogue = DonorCatalogue(4096, min_run=32)
    events = SimpleNamespace(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq"))
    announce(catalogue, "model", events, told.append)
    donor = catalogue.add(Namespace("model", "", "secret salt"), np.arange(50), None).donor
    catalogue.remove(donor.donor_id)
    raw = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=told))
    assert b"secret salt" not in raw
    stored, removed = decode_batch(raw).events
    assert is_donor(stored)
    assert stored.token_ids == tuple(range(50))
    assert scope_of(salt="secret salt") in stored.extra_keys[0]
    assert removed.block_hashes == stored.block_hashes


def test_donors_cannot_be_told_of_without_events():
    with pytest.raises(ConfigError, match="--kv-events-config"):
        announce(DonorCatalogue(4096), "model", SimpleNamespace(kv_events_config=None), print)


def test_vllm_reads_our_donors():
    donor = DonorCatalogue(1_000).add(Namespace("model", "", "salt"), np.arange(40), None).donor
    batch = EventBatch(1.5, (donor_stored(donor), donor_removed(donor)))
    stored, removed = msgspec.msgpack.Decoder(KVEventBatch).decode(encode_batch(batch)).events
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == (removed.block_hashes, list(range(40)), 40)
    assert (stored.medium, stored.ownership, stored.parent_block_hash) == ("CPU", "kvgraft", DONOR_PARENT)
    assert stored.extra_keys == [(donor.namespace.key.hex(), scope_of(salt="salt"), "at:0:")]
    assert removed.ownership == "kvgraft"


def test_we_read_what_vllm_writes_of_adapters_and_salts():
    fields = {"lora_id": 1, "medium": "GPU", "lora_name": "tuned", "group_idx": 0}
    stored = TheirStored(
        block_hashes=[b"one", b"two"],
        parent_block_hash=None,
        token_ids=list(range(8)),
        block_size=4,
        extra_keys=[("tuned", "salt"), ("tuned",)],
        **fields,
    )
    payload = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=[stored]))
    (event,) = decode_batch(payload).events
    assert (event.block_hashes, event.group_idx) == ((b"one", b"two"), 0)
    assert scope_of_pages(event) == scope_of("tuned", "salt")
