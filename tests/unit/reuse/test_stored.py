"""A catalogue and the contents of stores, kept together."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.memory.store.record import DonorRecord
from kvgraft.reuse.stored import StoredKV, is_stored
from kvgraft.reuse.stored_donors import StoredDonors
from kvgraft.types import Namespace

NAMESPACE = Namespace("model", tenant_salt="tenant")


def record(number, num_tokens=100, generation=0, namespace=NAMESPACE):
    tokens = np.random.default_rng(number).integers(0, 1_000, num_tokens, dtype=np.int32)
    return DonorRecord(namespace.key, tokens, generation, start_position=number)


@pytest.fixture
def catalogue():
    return DonorCatalogue(1_000)


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def stored(catalogue, clock):
    return StoredDonors(catalogue, min_run=32, max_generation=2, clock=lambda: clock[0])


def resident(catalogue, one):
    return catalogue.add(
        NAMESPACE, one.token_ids, "resident", generation=one.generation, start_position=one.start_position
    ).donor


def found(catalogue, one, namespace=NAMESPACE):
    return sum(match.length for match in catalogue.find(DonorQuery(namespace, np.append(one.token_ids, 1))))


def test_donors_of_others_join_and_are_found(stored, catalogue):
    one = record(1)
    donor = stored.join(one, 0)
    assert donor.kv == StoredKV(one.key)
    assert (donor.start_position, donor.generation) == (1, 0)
    assert (stored.key_of(donor.donor_id), stored.donor_of(one.key)) == (one.key, donor.donor_id)
    assert found(catalogue, one) == 100


def test_another_tenant_does_not_find_them(stored, catalogue):
    one = record(1)
    stored.join(one, 0)
    assert found(catalogue, one, Namespace("model", tenant_salt="other")) == 0
    assert found(catalogue, one, Namespace("other", tenant_salt="tenant")) == 0


def test_what_is_reported_twice_joins_once(stored, catalogue):
    assert [stored.join(record(1), 0) is not None for _ in range(3)] == [True, False, False]
    assert len(catalogue) == 1


def test_what_is_of_no_use_stays_out(stored, catalogue):
    assert stored.join(record(1, num_tokens=31), 0) is stored.join(record(2, generation=3), 0) is None
    assert len(catalogue) == 0


class TestHolders:
    def test_the_first_store_is_read_while_it_holds_the_object(self, stored, catalogue):
        one = record(1)
        donor = stored.join(one, 1)
        stored.join(one, 0)
        assert stored.holder_of(donor.donor_id) == 0
        assert not stored.lost(one.key, 0)
        assert stored.holder_of(donor.donor_id) == 1
        assert stored.lost(one.key, 1)
        assert stored.holder_of(donor.donor_id) is None
        assert len(catalogue) == 0

    def test_every_store_may_lose_an_object_at_once(self, stored, catalogue):
        one = record(1)
        stored.join(one, 0)
        stored.join(one, 1)
        assert stored.lost(one.key)
        assert len(catalogue) == 0

    def test_what_the_store_has_lost_leaves(self, stored, catalogue):
        one, other = record(1), record(2)
        stored.join(one, 0)
        stored.join(other, 0)
        stored.lost(one.key, 0)
        stored.lost("a key that is not known", 0)
        assert [donor.kv for donor in catalogue] == [StoredKV(other.key)]
        assert stored.donor_of(one.key) is None
        assert found(catalogue, one) == 0
        assert stored.join(one, 0) is not None

    def test_a_resident_donor_stays_though_the_store_has_lost_it(self, stored, catalogue):
        one = record(1)
        donor = resident(catalogue, one)
        stored.hold(one.key, 0)
        stored.bind(donor.donor_id, one.key)
        stored.lost(one.key, 0)
        assert catalogue.get(donor.donor_id) is donor
        assert stored.key_of(donor.donor_id) is None

    def test_what_is_in_use_leaves_later(self, stored, catalogue):
        one = record(1)
        donor = stored.join(one, 0)
        catalogue.pin(donor.donor_id)
        stored.lost(one.key, 0)
        assert catalogue.get(donor.donor_id) is not None
        catalogue.unpin(donor.donor_id)
        stored.lost(one.key, 0)
        assert catalogue.get(donor.donor_id) is None


class TestDonorsOfThisProcess:
    def test_an_offered_donor_is_bound_once_a_store_holds_it(self, stored, catalogue):
        one = record(1)
        donor = resident(catalogue, one)
        assert stored.offer(donor.donor_id, one.key)
        assert not stored.demote(donor.donor_id)
        assert stored.join(one, 0) is None
        assert stored.key_of(donor.donor_id) == one.key
        assert stored.demote(donor.donor_id)
        assert is_stored(catalogue.get(donor.donor_id))
        assert catalogue.num_stored == 1

    def test_what_a_store_holds_is_not_offered(self, stored, catalogue):
        """The stored entry of the same object leaves for the resident one."""
        one = record(1)
        stored.join(one, 0)
        donor = resident(catalogue, one)
        assert not stored.offer(donor.donor_id, one.key)
        assert [each.donor_id for each in catalogue] == [donor.donor_id]
        assert stored.donor_of(one.key) == donor.donor_id

    def test_an_entry_in_use_stays_beside_a_resident_one(self, stored, catalogue):
        one = record(1)
        entry = stored.join(one, 0)
        catalogue.pin(entry.donor_id)
        own = resident(catalogue, one)
        stored.bind(own.donor_id, one.key)
        assert stored.donor_of(one.key) == entry.donor_id
        assert stored.key_of(own.donor_id) is None

    def test_a_donor_that_is_gone_is_not_bound(self, stored, catalogue):
        donor = resident(catalogue, record(1))
        catalogue.remove(donor.donor_id)
        stored.bind(donor.donor_id, record(1).key)
        assert stored.donor_of(record(1).key) is None

    def test_text_of_an_offered_donor_that_is_gone_joins(self, stored, catalogue):
        one = record(1)
        donor = resident(catalogue, one)
        stored.offer(donor.donor_id, one.key)
        catalogue.remove(donor.donor_id)
        assert stored.join(one, 0) is not None

    def test_text_is_covered_by_what_is_stored_and_by_nothing_else(self, stored, catalogue):
        one = record(1, 200)
        part = DonorRecord(one.namespace_key, one.token_ids[50:200], 0, 0)
        resident(catalogue, one)
        assert not stored.covers(part)
        catalogue.reset()
        stored.join(one, 0)
        assert stored.covers(part)
        longer = DonorRecord(one.namespace_key, np.append(one.token_ids, record(2, 40).token_ids), 0, 0)
        assert not stored.covers(longer)

    def test_a_donor_of_a_higher_generation_covers_nothing(self, stored):
        one = record(1, 200, generation=1)
        stored.join(one, 0)
        assert not stored.covers(DonorRecord(one.namespace_key, one.token_ids, 0, 0))


class TestLittleRoom:
    @pytest.fixture
    def full(self, catalogue, stored):
        """A resident donor that leaves 50 tokens."""
        return resident(catalogue, record(0, 950))

    def test_no_resident_donor_leaves(self, stored, catalogue, full):
        assert stored.join(record(1), 0) is None
        assert catalogue.get(full.donor_id) is not None

    def test_what_was_left_out_is_recalled_when_there_is_room(self, stored, catalogue, clock, full):
        """As much as fits, each once, the oldest first, and not at every moment: each recall reads heads."""
        out = [record(number, 400) for number in range(1, 4)]
        for one in out:
            stored.join(one, 0)
        assert stored.recall() == []
        catalogue.remove(full.donor_id)
        assert stored.recall() == [out[0].key, out[1].key]
        for one in out[:2]:
            stored.join(one, 0)
        catalogue.remove(stored.donor_of(out[0].key))
        clock[0] = 29.0
        assert stored.recall() == []
        assert stored.recall(reserved_tokens=600, is_urgent=True) == []
        clock[0] = 31.0
        assert stored.recall() == [out[2].key]
        assert stored.recall(is_urgent=True) == [out[0].key]
        assert stored.recall(is_urgent=True) == []

    def test_a_rank_follows_the_recall_of_another(self, stored, catalogue, full):
        one = record(1)
        stored.join(one, 0)
        catalogue.remove(full.donor_id)
        stored.recalled([one.key, "a key that is not known"])
        assert not stored.holders(one.key)
        assert stored.recall() == []
        assert stored.join(one, 0) is not None

    def test_what_was_left_out_and_is_gone_is_not_recalled(self, stored, catalogue, full):
        one, other = record(1), record(2)
        stored.join(one, 0)
        stored.join(other, 0)
        stored.lost(one.key, 0)
        catalogue.remove(full.donor_id)
        assert stored.recall() == [other.key]

    def test_an_evicted_donor_comes_back(self, stored, catalogue):
        one = record(1)
        stored.join(one, 0)
        catalogue.evict(1)
        assert stored.recall() == [one.key]

    def test_a_donor_that_was_replaced_does_not_come_back(self, stored, catalogue):
        donor = stored.join(record(1), 0)
        stored.unbind(donor.donor_id)
        catalogue.remove(donor.donor_id)
        assert stored.recall() == []

    def test_not_all_that_was_left_out_is_remembered(self, stored, catalogue, full, monkeypatch):
        monkeypatch.setattr("kvgraft.reuse.stored_donors._MOST_KEYS", 3)
        out = [record(number) for number in range(1, 7)]
        for one in out:
            stored.join(one, 0)
        catalogue.remove(full.donor_id)
        assert stored.recall() == [one.key for one in out[3:]]


def test_clear_leaves_resident_donors_alone(stored, catalogue):
    stored.join(record(1), 0)
    own = resident(catalogue, record(2))
    stored.hold(record(2).key, 0)
    stored.bind(own.donor_id, record(2).key)
    stored.clear()
    assert [donor.donor_id for donor in catalogue] == [own.donor_id]
    assert stored.key_of(own.donor_id) is None
    assert stored.recall() == []


def test_a_donor_that_is_offered_before_a_space_is_entered_is_bound(stored, catalogue):
    one = record(1)
    donor = resident(catalogue, one)
    assert stored.offer(donor.donor_id, one.key)
    stored.clear()
    assert stored.join(one, 0) is None
    assert stored.key_of(donor.donor_id) == one.key
    assert len(catalogue) == 1


def test_a_reset_forgets_all(stored, catalogue):
    donor = stored.join(record(1), 0)
    catalogue.reset()
    assert (stored.key_of(donor.donor_id), stored.donor_of(record(1).key)) == (None, None)
    assert stored.join(record(1), 0) is not None
