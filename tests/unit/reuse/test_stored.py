"""A catalogue and a store's contents, kept together."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue
from kvgraft.donors.record import DonorRecord, StoreNews
from kvgraft.reuse.stored import StoredDonors, StoredKV
from kvgraft.types import Namespace

NAMESPACE = Namespace("model", tenant_salt="tenant")


def record(number, num_tokens=100, generation=0, namespace=NAMESPACE):
    tokens = np.random.default_rng(number).integers(0, 1_000, num_tokens, dtype=np.int32)
    return DonorRecord(namespace.key, tokens, generation, start_position=number)


@pytest.fixture
def catalogue():
    return DonorCatalogue(1_000)


@pytest.fixture
def stored(catalogue):
    return StoredDonors(catalogue, min_run=32, max_generation=2)


def found(catalogue, one, namespace=NAMESPACE):
    return sum(match.length for match in catalogue.find(namespace, np.append(one.token_ids, 1)))


def test_donors_of_others_join_and_are_found(stored, catalogue):
    one = record(1)
    (donor,) = stored.take(StoreNews((one,)))
    assert donor.kv == StoredKV(one.key)
    assert (donor.start_position, donor.generation) == (1, 0)
    assert (stored.key_of(donor.donor_id), stored.donor_of(one.key)) == (one.key, donor.donor_id)
    assert found(catalogue, one) == 100


def test_another_tenant_does_not_find_them(stored, catalogue):
    one = record(1)
    stored.take(StoreNews((one,)))
    assert found(catalogue, one, Namespace("model", tenant_salt="other")) == 0
    assert found(catalogue, one, Namespace("other", tenant_salt="tenant")) == 0


def test_what_is_told_twice_joins_once(stored, catalogue):
    stored.take(StoreNews((record(1), record(1))))
    stored.take(StoreNews((record(1),)))
    assert len(catalogue) == 1


def test_what_is_of_no_use_stays_out(stored, catalogue):
    assert stored.take(StoreNews((record(1, num_tokens=31), record(2, generation=3)))) == []
    assert len(catalogue) == 0


def test_they_drive_nobody_out(stored, catalogue):
    near = catalogue.add(NAMESPACE, record(0, 950).token_ids, "near").donor
    assert stored.take(StoreNews((record(1),))) == []
    assert stored.num_left_out == 1
    assert catalogue.get(near.donor_id) is not None


def test_what_was_left_out_is_named_when_there_is_room(stored, catalogue):
    """As much as fits, each once, the first that was left out first."""
    near = catalogue.add(NAMESPACE, record(0, 950).token_ids, "near").donor
    out = [record(number, 400) for number in range(1, 4)]
    stored.take(StoreNews(tuple(out)))
    assert stored.with_room() == []
    catalogue.remove(near.donor_id)
    assert stored.with_room() == [out[0].key, out[1].key]
    stored.take(StoreNews(tuple(out[:2])))
    assert (stored.with_room(), len(catalogue)) == ([], 2)
    catalogue.reset()
    assert stored.with_room() == [out[2].key]
    assert stored.with_room() == []


def test_what_was_left_out_and_is_gone_is_not_named(stored, catalogue):
    near = catalogue.add(NAMESPACE, record(0, 950).token_ids, "near").donor
    one, other = record(1), record(2)
    stored.take(StoreNews((one, other)))
    stored.take(StoreNews(removed=(one.key,)))
    catalogue.remove(near.donor_id)
    assert stored.with_room() == [other.key]


def test_not_all_that_was_left_out_is_remembered(stored, catalogue, monkeypatch):
    monkeypatch.setattr("kvgraft.reuse.stored._MOST_LEFT_OUT", 3)
    near = catalogue.add(NAMESPACE, record(0, 950).token_ids, "near").donor
    out = [record(number) for number in range(1, 7)]
    stored.take(StoreNews(tuple(out)))
    catalogue.remove(near.donor_id)
    assert stored.with_room() == [one.key for one in out[3:]]


def test_what_the_store_has_lost_leaves(stored, catalogue):
    one, other = record(1), record(2)
    stored.take(StoreNews((one, other)))
    stored.take(StoreNews(removed=(one.key, "nobody knows this")))
    assert [donor.kv for donor in catalogue] == [StoredKV(other.key)]
    assert stored.donor_of(one.key) is None
    assert found(catalogue, one) == 0
    assert len(stored.take(StoreNews((one,)))) == 1


def test_what_is_near_stays_though_the_store_has_lost_it(stored, catalogue):
    one = record(1)
    donor = catalogue.add(NAMESPACE, one.token_ids, "near").donor
    stored.bind(donor.donor_id, one.key)
    stored.lost(one.key)
    assert catalogue.get(donor.donor_id) is donor
    assert stored.key_of(donor.donor_id) is None


def test_what_is_in_use_leaves_later(stored, catalogue):
    one = record(1)
    (donor,) = stored.take(StoreNews((one,)))
    catalogue.pin(donor.donor_id)
    stored.lost(one.key)
    assert catalogue.get(donor.donor_id) is not None
    catalogue.unpin(donor.donor_id)
    stored.lost(one.key)
    assert catalogue.get(donor.donor_id) is None


def test_a_donor_that_is_gone_is_not_bound(stored, catalogue):
    donor = catalogue.add(NAMESPACE, record(1).token_ids, "near").donor
    catalogue.remove(donor.donor_id)
    stored.bind(donor.donor_id, record(1).key)
    assert stored.donor_of(record(1).key) is None
    assert stored.forget(donor.donor_id) is None


def test_two_donors_of_one_key_do_not_forget_each_other(stored, catalogue):
    """One that the feed told of, and this process's own."""
    one = record(1)
    (told,) = stored.take(StoreNews((one,)))
    own = catalogue.add(NAMESPACE, one.token_ids, "near").donor
    stored.bind(own.donor_id, one.key)
    assert stored.forget(told.donor_id) == one.key
    assert stored.donor_of(one.key) == own.donor_id
    assert stored.forget(own.donor_id) == one.key
    assert stored.donor_of(one.key) is None


def test_clear_forgets_all(stored, catalogue):
    (donor,) = stored.take(StoreNews((record(1),)))
    catalogue.reset()
    stored.clear()
    assert (stored.key_of(donor.donor_id), stored.donor_of(record(1).key)) == (None, None)
    assert len(stored.take(StoreNews((record(1),)))) == 1
