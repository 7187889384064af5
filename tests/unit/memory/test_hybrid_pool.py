"""Two spaces of slots behind one pool: each layer reads and writes its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import ConfigError
from kvgraft.memory import HybridSlotPool, KVBlock, LayerShape
from kvgraft.windows import SlidingWindow

SHAPES = [LayerShape(2, 4), LayerShape(1, 8), LayerShape(2, 4), LayerShape(1, 4)]
WINDOWS = [SlidingWindow(6), None, SlidingWindow(5), None]


def make_pool(shapes=SHAPES, windows=WINDOWS):
    return HybridSlotPool(shapes, windows, num_slots=20, num_window_slots=8, dtype=torch.float32)


def random_kv(shape, count):
    return torch.randn(count, shape.num_kv_heads, shape.head_dim), torch.randn(
        count, shape.num_kv_heads, shape.head_dim
    )


def test_layers_are_read_back_from_the_space_they_were_written_to():
    pool = make_pool()
    full, window = np.array([3, 19, 7]), np.array([7, 0, 4])
    place = pool.place(full, window)
    written = [random_kv(shape, 3) for shape in SHAPES]
    for layer, (keys, values) in enumerate(written):
        place.write(layer, keys, values)
    for layer, (keys, values) in enumerate(written):
        own, number = pool.pool_of(layer)
        slots = window if WINDOWS[layer] else full
        assert own is (pool.window if WINDOWS[layer] else pool.full)
        assert torch.equal(own.keys(number)[slots], keys)
        assert torch.equal(place.read(layer)[1], values)


def test_export_joins_both_spaces_in_layer_order():
    pool = make_pool()
    full, window = np.array([3, 4]), np.array([1, 2])
    place = pool.place(full, window)
    written = [random_kv(shape, 2) for shape in SHAPES]
    for layer, (keys, values) in enumerate(written):
        place.write(layer, keys, values)
    block = pool.export(full, pool.export_windows(window))
    assert block.num_bytes == 2 * pool.bytes_per_token
    for (keys, values), exported, exported_values in zip(written, block.keys, block.values, strict=True):
        assert torch.equal(keys, exported)
        assert torch.equal(values, exported_values)


def test_sizes_are_those_of_both_spaces():
    pool = make_pool()
    assert pool.window_kind == SlidingWindow(6)
    assert (pool.num_slots, pool.num_window_slots) == (20, 8)
    assert pool.full_bytes_per_token == 2 * (8 + 4) * 4
    assert pool.bytes_per_token == 2 * (8 + 8 + 8 + 4) * 4
    assert pool.num_bytes == 20 * pool.full_bytes_per_token + 8 * 2 * 16 * 4


def test_model_with_windows_only_has_full_slots_as_numbers():
    pool = make_pool(SHAPES[:2], [SlidingWindow(4)] * 2)
    assert pool.full is None
    assert pool.full_bytes_per_token == 0
    place = pool.place(np.array([15]), np.array([2]))
    keys, values = random_kv(SHAPES[1], 1)
    place.write(1, keys, values)
    assert torch.equal(pool.window.keys(1)[[2]], keys)
    windows = pool.export_windows(np.array([2]))
    assert pool.export(np.array([15]), windows) is windows


@pytest.mark.parametrize("window", [np.array([-1]), np.array([8]), None, np.array([1, 2])])
def test_window_slot_that_is_not_there_is_refused(window):
    with pytest.raises(ConfigError):
        make_pool().place(np.array([0]), window)


@pytest.mark.parametrize("windows", [[None, None], [SlidingWindow(4)]])
def test_layers_without_a_window_make_no_hybrid_pool(windows):
    with pytest.raises(ConfigError):
        make_pool(SHAPES[:2], windows)


def test_joined_blocks_hold_their_tokens_one_behind_another():
    first, second = (KVBlock((torch.randn(n, 2, 4),), (torch.randn(n, 2, 4),)) for n in (3, 2))
    joined = KVBlock.join([first, second])
    assert torch.equal(joined.keys[0], torch.cat([first.keys[0], second.keys[0]]))
    assert torch.equal(joined.span(3, 2).values[0], second.values[0])
    assert KVBlock.join([first]) is first


def test_blocks_of_different_layers_are_not_joined():
    one = KVBlock((torch.zeros(1, 2, 4),), (torch.zeros(1, 2, 4),))
    two = KVBlock((torch.zeros(1, 2, 4),) * 2, (torch.zeros(1, 2, 4),) * 2)
    for blocks in ([], [one, two]):
        with pytest.raises(ConfigError):
            KVBlock.join(blocks)
