"""Events lose what is told of private blocks, and nothing else."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from kvgraft.integrations.vllm.scheduler.private_hashes import is_private, is_tainted, make_private
from kvgraft.integrations.vllm.scheduler.public_events import public_events


@dataclass(frozen=True)
class Stored:
    block_hashes: list
    token_ids: list
    block_size: int = 2
    parent_block_hash: object = None
    extra_keys: list | None = None


@dataclass(frozen=True)
class Removed:
    block_hashes: list


class Cleared:
    pass


def as_bytes(value):
    return value


def as_number(value):
    """What vLLM tells unless it is told otherwise."""
    return int.from_bytes(value, "big") & ((1 << 64) - 1)


@pytest.fixture(params=[as_bytes, as_number])
def told(request):
    """Hashes of a request of four blocks, the last two of them its own."""
    asked = SimpleNamespace(block_hashes=[secrets.token_bytes(32) for _ in range(4)])
    make_private(asked, 2)
    return [request.param(value) for value in asked.block_hashes]


@pytest.mark.parametrize("size", [16, 32])
def test_private_hashes_are_known_again(size):
    public = [secrets.token_bytes(size) for _ in range(200)]
    asked = SimpleNamespace(block_hashes=list(public))
    assert not is_tainted(asked)
    private = make_private(asked, 50)
    assert is_tainted(asked)
    for form in (as_bytes, as_number):
        for _ in range(3):
            assert [is_private(form(value)) for value in asked.block_hashes] == [False] * 50 + [True] * 150
            private.renew()
    assert len(set(asked.block_hashes)) == 200
    assert {len(value) for value in asked.block_hashes} == {size}


def test_what_is_public_is_told_as_it_is(told):
    events = [Stored(told[:2], [1, 2, 3, 4], extra_keys=[("salt",), None]), Cleared(), Removed(told[:2])]
    assert list(public_events(events)) == events


def test_a_block_behind_a_graft_is_not_told_of(told):
    event = Stored(told, list(range(8)), extra_keys=[("salt",), None, None, None])
    assert list(public_events([event])) == [Stored(told[:2], [0, 1, 2, 3], extra_keys=[("salt",), None])]
    assert list(public_events([Stored(told[2:], [4, 5, 6, 7], parent_block_hash=told[1])])) == []


def test_where_blocks_were_left_out_nothing_is_told_of_a_grafted_request(told):
    assert list(public_events([Stored(told[1:], list(range(8)))])) == []


def test_removals_of_private_blocks_are_not_told(told):
    assert list(public_events([Removed(told)])) == [Removed(told[:2])]
    assert list(public_events([Removed(told[2:])])) == []
