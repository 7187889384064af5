"""SlotPool: what is written is read back bit for bit, through slices and index tensors, in fp32 and bf16."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvgraft.memory
from kvgraft.errors import ConfigError
from kvgraft.memory import KVBlock, LayerShape, SlotPool, as_index
from kvgraft.memory.packed import keeps_nothing_else

SHAPES = (LayerShape(2, 4), LayerShape(1, 8))
NUM_SLOTS = 10


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


def make_pool(dtype=torch.float32):
    return SlotPool(SHAPES, NUM_SLOTS, dtype)


def make_kv(num_tokens, shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    size = (num_tokens, shape.num_kv_heads, shape.head_dim)
    return tuple(torch.randn(size, generator=generator).to(dtype) for _ in range(2))


def fill(pool, seed=0):
    """Random KV in every slot."""
    for layer, shape in enumerate(pool.layers):
        pool.write(layer, slice(0, NUM_SLOTS), *make_kv(NUM_SLOTS, shape, pool.dtype, seed + layer))


def slots_of(*slots):
    return np.array(slots, dtype=np.int64)


def test_index_is_a_slice_only_for_one_ascending_run():
    assert as_index(slots_of(3, 4, 5)) == slice(3, 6)
    assert as_index(slots_of(7)) == slice(7, 8)
    assert as_index(slots_of()) == slice(0, 0)
    for slots in ((5, 4, 3), (1, 3), (1, 3, 2, 4), (0, 2, 2, 3)):
        index = as_index(slots_of(*slots))
        assert isinstance(index, torch.Tensor)
        assert index.tolist() == list(slots)


@pytest.mark.parametrize("slots", [(-1,), (10,), (3, 10), (-1, 0)])
def test_pool_refuses_slots_it_does_not_have(slots):
    with pytest.raises(ConfigError):
        make_pool().index(slots_of(*slots))


def test_fresh_pool_is_zero():
    pool = make_pool()
    assert not any(tensor(layer).any() for tensor in (pool.keys, pool.values) for layer in range(2))


@pytest.mark.parametrize("slots", [(3, 4, 5), (8, 2, 5)])
def test_what_is_written_is_read(dtype, slots):
    pool = make_pool(dtype)
    index = pool.index(slots_of(*slots))
    for layer, shape in enumerate(SHAPES):
        keys, values = make_kv(3, shape, dtype)
        pool.write(layer, index, keys, values)
        for given, got, stored in zip(
            (keys, values), pool.read(layer, index), (pool.keys(layer), pool.values(layer)), strict=True
        ):
            assert torch.equal(got, given)
            assert torch.equal(stored[list(slots)], given)
            assert stored.shape == (NUM_SLOTS, shape.num_kv_heads, shape.head_dim)
            assert stored.any(dim=(1, 2)).sum() == 3


def test_read_of_a_run_is_a_view_and_of_others_a_copy():
    pool = make_pool()
    keys, values = pool.read(0, pool.index(slots_of(3, 4, 5)))
    assert keys.data_ptr() == pool.keys(0)[3].data_ptr()
    assert values.data_ptr() == pool.values(0)[3].data_ptr()
    gathered, _ = pool.read(0, pool.index(slots_of(3, 5)))
    gathered.fill_(1)
    assert not pool.keys(0).any()


@pytest.mark.parametrize("index", [slice(0, 2), torch.tensor([0, 2])])
def test_write_neither_broadcasts_nor_casts(index):
    pool = make_pool()
    keys, values = make_kv(2, SHAPES[0])
    for wrong in (keys[:1], keys[:, :1], keys.bfloat16(), keys.reshape(2, -1)):
        with pytest.raises(ConfigError):
            pool.write(0, index, wrong, values)
        with pytest.raises(ConfigError):
            pool.write(0, index, keys, wrong)
    assert not pool.keys(0).any()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((0, 1, 2), (5, 6, 7)),
        ((0, 1, 2), (1, 2, 3)),
        ((1, 2, 3), (0, 1, 2)),
        ((0, 1, 2), (4, 0, 1)),
        ((4, 0, 1), (0, 1, 2)),
        ((3, 1), (1, 3)),
    ],
)
def test_copy_moves_all_layers_even_where_slots_overlap(dtype, source, target):
    pool = make_pool(dtype)
    fill(pool)
    before = [(pool.keys(layer).clone(), pool.values(layer).clone()) for layer in range(2)]
    pool.copy(pool.index(slots_of(*source)), pool.index(slots_of(*target)))
    for layer, (keys, values) in enumerate(before):
        keys[list(target)] = keys[list(source)].clone()
        values[list(target)] = values[list(source)].clone()
        assert torch.equal(pool.keys(layer), keys)
        assert torch.equal(pool.values(layer), values)


@pytest.mark.parametrize("target", [(5, 6, 7), (5, 7, 9), (9, 4, 6)])
def test_views_of_some_slots_are_written_to_others(dtype, target):
    """A graft of one span reads a run of the donor's slots as a view, and its own slots may be scattered."""
    pool = make_pool(dtype)
    fill(pool)
    place = pool.place(slots_of(*target))
    for layer in range(2):
        keys, values = (tensor.clone() for tensor in pool.read(layer, slice(1, 4)))
        place.write(layer, *pool.read(layer, slice(1, 4)))
        assert torch.equal(pool.keys(layer)[list(target)], keys)
        assert torch.equal(pool.values(layer)[list(target)], values)


def test_copy_refuses_different_lengths():
    with pytest.raises(ConfigError):
        make_pool().copy(slice(0, 2), slice(4, 5))


@pytest.mark.parametrize("slots", [(3, 4, 5), (8, 2, 5)])
def test_exported_block_loads_bit_equal(dtype, slots):
    pool = make_pool(dtype)
    fill(pool)
    block = pool.export(pool.index(slots_of(*slots)))
    assert block.num_bytes == 3 * pool.bytes_per_token
    expected = [pool.keys(layer)[list(slots)].clone() for layer in range(2)]
    pool.keys(0).zero_()
    pool.load(block, pool.index(slots_of(9, 0, 1)))
    for layer in range(2):
        assert torch.equal(pool.keys(layer)[[9, 0, 1]], expected[layer])


def test_export_owns_its_memory():
    pool = make_pool()
    block = pool.export(slice(2, 4))
    assert keeps_nothing_else(block)
    fill(pool)
    assert not any(tensor.any() for tensor in (*block.keys, *block.values))


def test_load_refuses_other_layers():
    pool = make_pool()
    block = pool.export(slice(0, 2))
    with pytest.raises(ConfigError):
        pool.load(KVBlock(block.keys[:1], block.values[:1]), slice(0, 2))
    with pytest.raises(ConfigError):
        pool.load(KVBlock(block.keys[::-1], block.values[::-1]), slice(0, 2))


def test_sizes_in_bytes(dtype):
    pool = make_pool(dtype)
    assert pool.bytes_per_token == 2 * (2 * 4 + 1 * 8) * dtype.itemsize
    assert pool.num_bytes == pool.bytes_per_token * NUM_SLOTS
    assert pool.num_bytes == sum(tensor(layer).nbytes for tensor in (pool.keys, pool.values) for layer in range(2))


def test_bad_sizes_are_refused():
    for layers, num_slots in (((), 4), (SHAPES, 0)):
        with pytest.raises(ConfigError):
            SlotPool(layers, num_slots, torch.float32)
    with pytest.raises(ConfigError):
        LayerShape(0, 4)


def test_public_names_exist_and_are_sorted():
    assert list(kvgraft.memory.__all__) == sorted(kvgraft.memory.__all__)
    assert all(getattr(kvgraft.memory, name) is not None for name in kvgraft.memory.__all__)
    with pytest.raises(AttributeError):
        _ = kvgraft.memory.nothing
