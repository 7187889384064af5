"""Host slots of states give back what was stored, with the number of tokens that it has read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory import HostStates, StatePart, StatePool

PARTS = (StatePart((3, 2), torch.bfloat16), StatePart((4,), torch.float32))


@pytest.fixture
def pool():
    pool = StatePool(PARTS, 5)
    for number, part in enumerate(PARTS):
        pool.scatter(number, torch.arange(5), torch.randn(5, *part.shape).to(part.dtype))
    pool.note_tokens({state: 10 + state for state in range(5)})
    return pool


def content(pool, state):
    return [pool.gather(number, torch.tensor([state])).clone() for number in range(len(PARTS))]


def test_what_is_stored_comes_back(pool):
    host = HostStates(pool, 3)
    kept = {state: host.store(np.array([state])) for state in (3, 1)}
    expected = content(pool, 3)
    pool.clear(3)
    host.load(kept[3], np.array([0]))
    assert all(map(torch.equal, content(pool, 0), expected))
    assert pool.num_tokens(0) == 13
    host.free(kept[3])
    assert host.num_free == 2
    host.check()


def test_a_full_host_takes_nothing(pool):
    host = HostStates(pool, 1)
    host.store(np.array([2]))
    with pytest.raises(CapacityError):
        host.store(np.array([3]))
    host.check()


def test_a_state_that_there_is_not_takes_no_slot(pool):
    host = HostStates(pool, 2)
    with pytest.raises(ConfigError):
        host.store(np.array([5]))
    with pytest.raises(CorruptCacheError):
        host.load(np.array([0]), np.array([1]))
    assert host.num_free == 2
    host.check()


def test_one_slot_for_each(pool):
    host = HostStates(pool, 2)
    kept = host.store(np.array([1, 2]))
    with pytest.raises(ConfigError, match="2 states for 1 slots"):
        host.load(kept, np.array([0]))
