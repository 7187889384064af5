"""Host slots give back what was stored, bit for bit, and notice slots that are lost or given twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory import HostSlots, LayerShape, SlotPool


@pytest.fixture
def pool():
    pool = SlotPool([LayerShape(2, 4), LayerShape(1, 8)], 20, torch.bfloat16)
    for layer, shape in enumerate(pool.layers):
        values = torch.randn(20, shape.num_kv_heads, shape.head_dim).bfloat16()
        pool.write(layer, slice(0, 20), values, -values)
    return pool


def content(pool, slots):
    index = pool.index(np.asarray(slots))
    return [tensor.clone() for layer in range(len(pool.layers)) for tensor in pool.read(layer, index)]


@pytest.mark.parametrize("slots", [[3, 4, 5, 6], [9, 2, 17, 3], [7]])
@pytest.mark.parametrize("back", [[0, 1, 2, 3], [11, 5, 19, 0]])
def test_what_is_stored_comes_back(pool, slots, back):
    host = HostSlots(pool, 12)
    first = host.store(np.arange(5))
    kept = host.store(np.asarray(slots))
    host.free(first)
    scattered = host.store(np.arange(8, 20)[: host.num_free])  # around what is kept
    expected = content(pool, slots)
    target = np.asarray(back[: len(slots)])
    host.load(kept, target)
    assert all(map(torch.equal, content(pool, target), expected))
    assert len({*kept.tolist(), *scattered.tolist()}) == 12
    host.check()


def test_a_full_host_takes_nothing(pool):
    host = HostSlots(pool, 4)
    with pytest.raises(CapacityError):
        host.store(np.arange(5))
    assert host.num_free == 4
    host.check()


def test_a_copy_that_fails_takes_no_slot(pool):
    host = HostSlots(pool, 4)
    with pytest.raises(ConfigError):
        host.store(np.array([0, 20]))
    assert host.num_free == 4
    host.check()


def test_slots_are_given_back_once(pool):
    host = HostSlots(pool, 4)
    slots = host.store(np.arange(3))
    with pytest.raises(CorruptCacheError):
        host.free(np.array([slots[0], slots[0]]))
    host.free(slots)
    for use in (host.free, lambda given: host.load(given, np.arange(3))):
        with pytest.raises(CorruptCacheError):
            use(slots)
    assert host.num_free == 4
    host.check()


def test_damage_is_noticed(pool):
    host = HostSlots(pool, 4)
    host._num_free = 3
    with pytest.raises(CorruptCacheError):
        host.check()


def test_at_least_one_slot(pool):
    with pytest.raises(ConfigError, match="at least one"):
        HostSlots(pool, 0)
