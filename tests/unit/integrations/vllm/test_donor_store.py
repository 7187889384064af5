"""Donors of one rank in host memory, and texts that grow beside it."""

from __future__ import annotations

import pytest
import torch
from tests.unit.memory.test_host_store_contract import BYTES_PER_TOKEN, assert_same, make_block

from kvgraft.errors import CapacityError, CorruptCacheError, StoreError
from kvgraft.integrations.vllm.worker.donor_store import DonorStore
from kvgraft.memory import HostKVStore


@pytest.fixture
def store():
    return HostKVStore(10 * BYTES_PER_TOKEN)


def keep(donors, donor_id, *parts):
    for part in parts:
        donors.append(100 + donor_id, part)
    donors.seal(100 + donor_id, donor_id)


def test_a_text_in_parts_becomes_one_donor(store):
    donors, whole = DonorStore(store), make_block(6)
    donors.append(7, whole.span(0, 4))
    assert (donors.used_bytes, store.used_bytes, donors.text_ids) == (4 * BYTES_PER_TOKEN, 0, {7})
    donors.append(7, whole.span(4, 2))
    donors.seal(7, 1)
    assert (donors.used_bytes, store.used_bytes, donors.text_ids) == (6 * BYTES_PER_TOKEN, 6 * BYTES_PER_TOKEN, set())
    assert_same(donors.get(1, 3, 3), whole.span(3, 3))
    donors.check()


def test_what_the_store_refuses_is_no_donor(store):
    donors = DonorStore(store)
    keep(donors, 1, make_block(6))
    with pytest.raises(CapacityError):
        keep(donors, 2, make_block(5))
    with pytest.raises(StoreError):
        keep(donors, 1, make_block(2))
    donors.drop(2)
    assert (donors.used_bytes, donors.text_ids) == (6 * BYTES_PER_TOKEN, set())
    donors.check()


def test_everything_is_forgotten_in_the_store_too(store):
    donors = DonorStore(store)
    for donor_id in (1, 2, 3):
        keep(donors, donor_id, make_block(2))
    donors.append(9, make_block(3))
    donors.drop(2)
    donors.drop(2)
    donors.clear()
    assert (donors.used_bytes, len(store), donors.text_ids) == (0, 0, set())
    with pytest.raises(StoreError):
        donors.get(1, 0, 2)
    keep(donors, 1, make_block(10, seed=1))
    assert torch.equal(donors.get(1, 0, 10).keys[0][1:], make_block(10, seed=1).keys[0][1:])
    donors.check()


def test_a_block_that_is_no_donors_is_found(store):
    donors = DonorStore(store)
    store.put("stray", make_block(1))
    with pytest.raises(CorruptCacheError):
        donors.check()
