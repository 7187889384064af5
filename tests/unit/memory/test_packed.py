"""Blocks in one piece of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.unit.memory.test_host_store_contract import BYTES_PER_TOKEN, assert_same, make_block

from kvgraft.memory import HostKVStore, KVBlock
from kvgraft.memory.packed import PackedLayout, keeps_nothing_else, packed
from kvgraft.memory.pool import LayerShape, SlotPool


def storages(block):
    return {tensor.untyped_storage().data_ptr() for tensor in (*block.keys, *block.values)}


@pytest.mark.parametrize("lengths", [(5,), (3, 1, 4), (0, 2)])
def test_runs_are_packed_one_after_the_other(lengths):
    whole = make_block(sum(lengths))
    starts = np.cumsum([0, *lengths])
    parts = [whole.span(int(start), length) for start, length in zip(starts, lengths, strict=False)]
    found = packed(parts)
    assert_same(found, whole)
    assert len(storages(found)) == 1
    assert keeps_nothing_else(found)


def test_rows_of_any_width_are_aligned():
    narrow, wide = torch.ones(3, 1, 1, dtype=torch.bfloat16), torch.full((3, 1, 1), 2.0)
    found = packed([KVBlock((narrow, wide), (wide, narrow))])
    assert torch.equal(found.keys[1], wide)
    assert torch.equal(found.values[1], narrow)


def test_a_view_of_more_keeps_something_else():
    block = packed([make_block(6)])
    assert not keeps_nothing_else(block.span(0, 5))
    assert not keeps_nothing_else(KVBlock(block.keys[:1], block.values[:1]))
    transposed = make_block(2).keys[0].transpose(1, 2)
    assert not keeps_nothing_else(KVBlock((transposed,), (transposed,)))


def test_the_host_store_keeps_a_packed_block_as_it_is_and_packs_views():
    store, block = HostKVStore(20 * BYTES_PER_TOKEN), packed([make_block(6)])
    store.put(1, block)
    assert storages(store.get(1)) == storages(block)
    store.put(2, block.span(1, 3))
    assert len(storages(store.get(2))) == 1
    assert store.used_bytes == 9 * BYTES_PER_TOKEN
    store.check()


def test_a_pool_exports_all_layers_in_one_piece():
    pool = SlotPool([LayerShape(2, 4), LayerShape(1, 8)], 10, torch.float32)
    keys, values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    slots = pool.index(np.array([7, 1, 4]))
    pool.write(0, slots, keys, values)
    block = pool.export(slots)
    assert len(storages(block)) == 1
    assert torch.equal(block.keys[0], keys)
    assert torch.equal(block.values[0], values)
    assert PackedLayout.of(block).bytes_per_token == pool.bytes_per_token
