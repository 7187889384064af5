"""AnchorIndex: what is inserted is found, tables are bounded, removal takes a donor's own entries and no other."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors.anchors import MAX_POSTINGS, AnchorIndex
from kvgraft.donors.fingerprint import Anchors
from kvgraft.donors.postings import WAYS
from kvgraft.errors import CorruptCacheError

SPREAD = 2**32 + 1
"""Makes of a small number a hash whose lower half chooses the bucket and whose upper half is the tag."""


def make_anchors(numbers, positions=None):
    hashes = np.array(numbers, np.uint64) * np.uint64(SPREAD)
    return Anchors(hashes, np.arange(len(hashes)) if positions is None else np.array(positions, np.int64))


def random_anchors(count, *, seed=0):
    return Anchors(np.random.default_rng(seed).integers(1, 2**63, count, dtype=np.uint64), np.arange(count))


def found(index, *numbers):
    return hits_of(index, np.array(numbers, np.uint64) * np.uint64(SPREAD))


def hits_of(index, hashes):
    hits = index.lookup(hashes)
    return list(zip(hits.query.tolist(), hits.rows.tolist(), hits.positions.tolist(), strict=True))


def test_empty_index_finds_nothing():
    assert found(AnchorIndex(8), 1, 2, 3) == []
    assert found(AnchorIndex(8)) == []


def test_lookup_returns_query_row_and_position_by_ascending_query():
    index = AnchorIndex(8)
    index.insert(5, make_anchors([100, 101, 102], [7, 70, 700]))
    index.insert(6, make_anchors([101], [9]))
    assert found(index, 102, 55, 101) == [(0, 5, 700), (2, 5, 70), (2, 6, 9)]
    index.check()


def test_repeated_hash_of_one_donor_lists_the_first_and_the_last():
    index = AnchorIndex(8)
    keys, _ = index.insert(0, make_anchors([9] * 100, range(100)))
    assert found(index, 9) == [(0, 0, 0), (0, 0, 99)]
    assert index.num_displaced == 0
    assert keys.tolist() == [9 * SPREAD]


def test_hash_of_many_donors_keeps_the_newest_postings():
    index = AnchorIndex(8)
    for row in range(100):
        index.insert(row, make_anchors([9]))
    assert sorted(row for _, row, _ in found(index, 9)) == list(range(100 - MAX_POSTINGS, 100))
    assert len(index) == MAX_POSTINGS
    index.check()


def test_full_bucket_displaces_its_oldest_entry():
    index = AnchorIndex(1)
    for row in range(WAYS + 2):
        index.insert(row, make_anchors([row + 1]))
    assert [row for row in range(WAYS + 2) if not found(index, row + 1)] == [0, 1]
    assert index.num_displaced == 2
    index.check()


def test_removal_frees_the_way_for_the_next():
    index = AnchorIndex(1)
    keys = [index.insert(row, make_anchors([row + 1])).keys for row in range(WAYS)]
    assert index.remove(3, keys[3]) == 1
    index.insert(99, make_anchors([1_000]))
    assert [row for row in range(WAYS) if not found(index, row + 1)] == [3]
    assert index.num_displaced == 0


def test_one_donor_with_more_anchors_than_a_bucket_fills_it():
    index = AnchorIndex(1)
    index.insert(0, make_anchors(range(1, 50)))
    assert len(index) == WAYS
    assert index.num_displaced == 49 - WAYS
    index.check()


def test_removal_clears_exactly_the_own_entries():
    index = AnchorIndex(256)
    shared, own = random_anchors(40, seed=1), random_anchors(200, seed=2)
    first = index.insert(1, shared).keys
    second = index.insert(2, Anchors(np.concatenate([shared.hashes, own.hashes]), np.arange(240))).keys
    assert index.remove(2, second) == 240
    assert len(index) == 40
    assert {row for _, row, _ in hits_of(index, shared.hashes)} == {1}
    assert index.remove(1, first) == 40
    assert len(index) == 0
    index.check()


def test_size_is_fixed_by_capacity_and_holds_it():
    index = AnchorIndex.for_tokens(100_000)
    anchors = random_anchors(100_000 // 9)
    index.insert(0, anchors)
    assert len(index) > 0.99 * len(anchors.hashes)


def test_clear_forgets_everything():
    index = AnchorIndex(8)
    index.insert(0, make_anchors([1, 2, 3]))
    index.clear()
    assert found(index, 1, 2, 3) == []
    assert len(index) == 0
    index.check()


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_agree_with_a_dictionary(seed):
    rng = np.random.default_rng(seed)
    index, expected, keys = AnchorIndex(512), {}, {}
    for row in range(60):
        anchors = random_anchors(int(rng.integers(1, 30)), seed=1_000 * seed + row)
        keys[row] = index.insert(row, anchors).keys
        expected[row] = dict(zip(anchors.hashes.tolist(), anchors.positions.tolist(), strict=True))
        if rng.random() < 0.4:
            gone = int(rng.choice(list(expected)))
            assert index.remove(gone, keys[gone]) == len(expected.pop(gone))
        index.check()
    assert index.num_displaced == 0
    assert len(index) == sum(index.count(row, keys[row]) for row in expected)
    for row, entries in expected.items():
        for anchor, position in entries.items():
            assert (0, row, position) in hits_of(index, np.array([anchor], np.uint64))


def test_what_a_key_has_no_place_for_is_told():
    index = AnchorIndex(8)
    assert index.insert(0, make_anchors([9] * 4, [3, 5, 7, 11])).crowded_out.positions.tolist() == [5, 7]
    rows, positions = index.insert(1, make_anchors([9, 10], [2, 4])).crowded_out
    assert (rows.tolist(), positions.tolist()) == ([0], [3])


def twice(table):
    table._tags[0, :2] = table._ages[0, :2] = 1
    table._num_entries = 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda table: setattr(table, "_num_entries", 9), "are counted"),
        (lambda table: table._ages.__setitem__(np.nonzero(table._tags), 0), "has none"),
        (lambda table: [table._tags.fill(7), table._ages.fill(1), setattr(table, "_num_entries", 64)], "more than 2"),  # type: ignore[func-returns-value]
        (lambda table: (table._postings.fill(3), table._tags.fill(0), table._ages.fill(0), twice(table)), "twice"),
    ],
)
def test_check_finds_damage(damage, message):
    index = AnchorIndex(8)
    index.insert(0, make_anchors([1]))
    damage(index._table)
    with pytest.raises(CorruptCacheError, match=message):
        index.check()
