"""StatePool: states are copied, exported and loaded whole, with the number of tokens they have seen, and go on alone."""

from __future__ import annotations

import pytest
import torch

from kvgraft.errors import ConfigError
from kvgraft.memory import StateBlock, StatePart, StatePool

PARTS = (StatePart((3, 2), torch.bfloat16), StatePart((4,), torch.float32))


def make_pool(num_states=3):
    return StatePool(PARTS, num_states)


def fill(pool, state, value, num_tokens):
    for number, part in enumerate(PARTS):
        pool.scatter(number, torch.tensor([state]), torch.full((1, *part.shape), value, dtype=part.dtype))
    pool.note_tokens({state: num_tokens})


def values(pool, state):
    return [pool.gather(number, torch.tensor([state]))[0] for number in range(len(PARTS))]


def holds(pool, state, value):
    return all(bool((part == value).all()) for part in values(pool, state))


def test_a_pool_begins_cleared():
    pool = make_pool()
    assert [pool.num_tokens(state) for state in range(3)] == [0, 0, 0]
    assert all(holds(pool, state, 0.0) for state in range(3))


def test_sizes_are_those_of_the_parts():
    pool = make_pool(num_states=5)
    assert (pool.bytes_per_state, pool.num_bytes, pool.num_states) == (3 * 2 * 2 + 4 * 4, 5 * 28, 5)


def test_a_cleared_state_has_nothing_of_the_one_before():
    pool = make_pool()
    fill(pool, 1, 7.0, 9)
    fill(pool, 2, 5.0, 4)
    pool.clear(1)
    assert pool.num_tokens(1) == 0
    assert holds(pool, 1, 0.0)
    assert holds(pool, 2, 5.0)
    assert pool.num_tokens(2) == 4


def test_a_copy_goes_on_alone():
    pool = make_pool()
    fill(pool, 0, 7.0, 9)
    pool.copy(0, 2)
    assert pool.num_tokens(2) == 9
    fill(pool, 2, 3.0, 11)
    assert holds(pool, 0, 7.0)
    assert (pool.num_tokens(0), pool.num_tokens(2)) == (9, 11)
    pool.copy(2, 2)
    assert holds(pool, 2, 3.0)


def test_an_exported_state_comes_back_bit_for_bit_and_shares_no_memory():
    pool = make_pool()
    for number, part in enumerate(PARTS):
        pool.scatter(number, torch.tensor([1]), torch.randn((1, *part.shape)).to(part.dtype))
    pool.note_tokens({1: 6})
    before = [part.clone() for part in values(pool, 1)]
    block = pool.export(1)
    fill(pool, 1, 2.0, 8)
    pool.load(0, block)
    assert (block.num_tokens, block.num_bytes, pool.num_tokens(0)) == (6, pool.bytes_per_state, 6)
    assert all(torch.equal(left, right) for left, right in zip(values(pool, 0), before, strict=True))
    fill(pool, 0, 1.0, 6)
    assert all(torch.equal(left, right) for left, right in zip(block.parts, before, strict=True))


def test_a_state_of_another_model_is_refused():
    pool = make_pool()
    for parts in (
        (torch.zeros(4), torch.zeros(3, 2, dtype=torch.bfloat16)),
        (torch.zeros(3, 2), torch.zeros(4)),
        (torch.zeros(3, 2, dtype=torch.bfloat16),),
    ):
        with pytest.raises(ConfigError, match="same model"):
            pool.load(0, StateBlock(parts, 5))
    assert pool.num_tokens(0) == 0


@pytest.mark.parametrize("state", [-1, 3])
def test_a_slot_outside_of_the_pool_is_refused(state):
    pool = make_pool()
    for call in (
        lambda: pool.clear(state),
        lambda: pool.copy(0, state),
        lambda: pool.copy(state, 0),
        lambda: pool.export(state),
        lambda: pool.num_tokens(state),
        lambda: pool.note_tokens({0: 1, state: 1}),
    ):
        with pytest.raises(ConfigError, match=r"\[0, 3\)"):
            call()


@pytest.mark.parametrize(("parts", "num_states"), [((), 3), (PARTS, 0)])
def test_a_pool_of_nothing_is_refused(parts, num_states):
    with pytest.raises(ConfigError, match="parts and states"):
        StatePool(parts, num_states)
