"""RadixCache by example: what is matched, taken, split, locked and dropped."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix import EvictionPolicy, PrefixCache, RadixCache, RadixKey


def make_key(*token_ids, extra_key=None):
    return RadixKey(np.array(token_ids, dtype=np.int64), extra_key)


def put(cache, *token_ids, first_slot=0, extra_key=None):
    """Insert with consecutive slots."""
    slots = np.arange(first_slot, first_slot + len(token_ids))
    return cache.insert(make_key(*token_ids, extra_key=extra_key), slots)


def matched(cache, *token_ids, extra_key=None):
    """Slots of the longest stored prefix."""
    return cache.match_prefix(make_key(*token_ids, extra_key=extra_key)).kv_indices.tolist()


def freed(cache, num_tokens):
    return cache.evict(num_tokens).freed.tolist()


# match and insert


def test_empty_cache_matches_nothing():
    cache = RadixCache()
    assert isinstance(cache, PrefixCache)
    assert matched(cache, 1, 2, 3) == []
    assert matched(cache) == []
    assert cache.total_size == 0
    cache.check()


def test_insert_returns_what_was_there_and_takes_the_rest():
    cache = RadixCache()
    first = put(cache, 1, 2, 3)
    second = put(cache, 1, 2, 3, 4, 5, first_slot=10)
    assert (first.prefix_len, first.total_len) == (0, 3)
    assert (second.prefix_len, second.total_len) == (3, 5)
    assert matched(cache, 1, 2, 3, 4, 5, 6) == [0, 1, 2, 13, 14]
    assert cache.total_size == 5


def test_insert_of_nothing_stores_nothing():
    cache = RadixCache(4)
    result = put(cache, 1, 2, 3)
    assert (result.prefix_len, result.total_len, cache.total_size) == (0, 0, 0)
    cache.check()


def test_match_inside_a_node_splits_it_and_keeps_all():
    cache = RadixCache()
    put(cache, 1, 2, 3, 4)
    assert matched(cache, 1, 2, 9) == [0, 1]
    assert matched(cache, 1, 2, 3, 4) == [0, 1, 2, 3]
    put(cache, 1, 2, 9, first_slot=10)
    assert matched(cache, 1, 2, 9) == [0, 1, 12]
    cache.check()


def test_match_ends_at_a_page_boundary():
    cache = RadixCache(4)
    put(cache, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert cache.total_size == 8
    assert matched(cache, 1, 2, 3, 4, 5, 6, 0, 0) == [0, 1, 2, 3]
    assert matched(cache, 1, 2, 3) == []
    assert matched(cache, 1, 2, 3, 4, 5, 6, 7, 8, 9) == list(range(8))
    cache.check()


def test_pages_that_share_a_beginning_are_siblings():
    cache = RadixCache(2)
    put(cache, 1, 1, 5, 5)
    put(cache, 1, 2, 5, 5, first_slot=10)
    assert matched(cache, 1, 1, 5, 5) == [0, 1, 2, 3]
    assert matched(cache, 1, 2, 5, 5) == [10, 11, 12, 13]


@pytest.mark.parametrize("extra_key", [None, b"", "", b"a", ("a", 1)])
def test_namespaces_share_nothing(extra_key):
    cache = RadixCache()
    put(cache, 1, 2, 3, extra_key=b"other")
    assert matched(cache, 1, 2, 3, extra_key=extra_key) == []
    put(cache, 1, 2, 3, first_slot=10, extra_key=extra_key)
    assert matched(cache, 1, 2, 3, extra_key=extra_key) == [10, 11, 12]
    assert matched(cache, 1, 2, 3, extra_key=b"other") == [0, 1, 2]
    assert cache.total_size == 6
    cache.check()


def test_a_dropped_namespace_leaves_nothing_behind():
    cache = RadixCache()
    for tenant in range(100):
        put(cache, 1, 2, first_slot=2 * tenant, extra_key=tenant)
    assert len(freed(cache, 200)) == 200
    assert not cache.root_handle.children


@pytest.mark.parametrize("num_tokens", [1, 1023, 1024, 1025, 9216, 9217, 100_000])
def test_mismatch_at_every_block_border_of_the_comparison(num_tokens):
    token_ids = np.arange(num_tokens)
    cache = RadixCache()
    cache.insert(RadixKey(token_ids), token_ids)
    assert cache.match_prefix(RadixKey(token_ids)).prefix_len == num_tokens
    changed = token_ids.copy()
    changed[-1] = -1
    assert cache.match_prefix(RadixKey(changed)).prefix_len == num_tokens - 1
    assert cache.match_prefix(RadixKey(np.append(token_ids, 0))).prefix_len == num_tokens


def test_cache_keeps_copies_and_gives_read_only_slots():
    cache = RadixCache()
    token_ids, slots = np.array([1, 2, 3]), np.array([7, 8, 9])
    cache.insert(RadixKey(token_ids), slots)
    token_ids[:] = 0
    slots[:] = 0
    result = cache.match_prefix(make_key(1, 2, 3))
    assert result.kv_indices.tolist() == [7, 8, 9]
    assert result.kv_indices.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        result.kv_indices[0] = 1


def test_result_of_an_earlier_match_survives_a_split():
    cache = RadixCache()
    put(cache, 1, 2, 3, 4)
    whole = cache.match_prefix(make_key(1, 2, 3, 4))
    matched(cache, 1, 2)
    assert whole.kv_indices.tolist() == [0, 1, 2, 3]


def test_split_halves_own_their_memory():
    cache = RadixCache()
    handle = put(cache, *range(1000)).handle
    upper = cache.match_prefix(make_key(*range(10))).handle
    for node, length in ((upper, 10), (handle, 990)):
        assert len(node.tokens) == 8 * length
        assert node.kv_indices.base is None
        assert node.kv_indices.nbytes == 8 * length


def test_handle_of_a_whole_page_prefix_covers_exactly_what_was_matched():
    cache = RadixCache()
    put(cache, 1, 2, 3, 4)
    cache.inc_lock_ref(cache.match_prefix(make_key(1, 2, 8)).handle)
    assert (cache.protected_size, cache.evictable_size) == (2, 2)


# keys


@pytest.mark.parametrize("token_ids", [[1, 2], (1, 2), np.array([1, 2], dtype=np.int32), np.arange(1, 5)[::2]])
def test_key_takes_any_integers(token_ids):
    key = RadixKey(token_ids)
    assert key.token_ids.dtype == np.int64
    assert len(key) == 2


def test_key_of_nothing_is_empty():
    assert len(RadixKey([])) == 0
    assert RadixKey([]).aligned_len(4) == 0


@pytest.mark.parametrize("token_ids", [[1.5], [[1]], 3, ["a"]])
def test_key_refuses_what_are_not_token_ids(token_ids):
    with pytest.raises(ConfigError):
        RadixKey(token_ids)


@pytest.mark.parametrize("kv_indices", [np.arange(2), np.arange(4), np.zeros(3), np.zeros((3, 1), dtype=int)])
def test_insert_refuses_slots_that_do_not_fit_the_key(kv_indices):
    cache = RadixCache()
    with pytest.raises(ConfigError):
        cache.insert(make_key(1, 2, 3), kv_indices)
    assert cache.total_size == 0


def test_page_size_must_be_positive():
    with pytest.raises(ConfigError):
        RadixCache(0)


# eviction


def test_evict_drops_the_least_recently_used_leaf_first():
    cache = RadixCache()
    put(cache, 1, 1)
    put(cache, 2, 2, first_slot=10)
    put(cache, 3, 3, first_slot=20)
    matched(cache, 1, 1)
    assert freed(cache, 1) == [10, 11]
    assert freed(cache, 1) == [20, 21]
    assert freed(cache, 1) == [0, 1]
    assert freed(cache, 1) == []


def test_parent_follows_its_last_child():
    cache = RadixCache()
    put(cache, 1, 2, 3, 4)
    put(cache, 1, 2, 5, 6, first_slot=10)
    put(cache, 9, first_slot=20)
    assert freed(cache, 3) == [2, 3, 12, 13]
    assert freed(cache, 1) == [0, 1]
    assert matched(cache, 9) == [20]
    cache.check()


def test_evict_of_nothing_drops_nothing():
    cache = RadixCache()
    put(cache, 1, 2)
    assert freed(cache, 0) == freed(cache, -5) == []
    assert cache.evict(5).num_tokens == 2


@pytest.mark.parametrize(("page_size", "num_tokens", "expected"), [(1, 3, 3), (4, 3, 4), (4, 5, 8), (4, 99, 16)])
def test_trimming_drops_no_page_beyond_what_is_asked_for(page_size, num_tokens, expected):
    cache = RadixCache(page_size)
    cache.insert(make_key(*range(16)), np.arange(16))
    assert sorted(cache.evict(num_tokens, trim=True).freed.tolist()) == list(range(16 - expected, 16))
    cache.check()
    assert cache.match_prefix(make_key(*range(16))).prefix_len == 16 - expected


def test_giving_back_a_lock_is_no_access():
    cache = RadixCache()
    old = put(cache, 1).handle
    cache.inc_lock_ref(old)
    put(cache, 2, first_slot=10)
    cache.dec_lock_ref(old)
    assert freed(cache, 1) == [0]


def test_policy_decides_the_order():
    class ShortestFirst(EvictionPolicy):
        def __call__(self, node):
            return (len(node), -node.last_access)

    cache = RadixCache(policy=ShortestFirst())
    put(cache, 1, 1, 1)
    put(cache, 2, 2, first_slot=10)
    put(cache, 3, 3, first_slot=20)
    assert freed(cache, 5) == [20, 21, 10, 11, 0, 1, 2]


# locks


def test_locked_path_survives_and_counts_as_protected():
    cache = RadixCache()
    put(cache, 1, 2, 3, 4)
    put(cache, 1, 2, 5, 6, first_slot=10)
    handle = cache.match_prefix(make_key(1, 2, 3, 4)).handle
    cache.inc_lock_ref(handle)
    cache.inc_lock_ref(handle)
    assert (cache.protected_size, cache.evictable_size) == (4, 2)
    assert freed(cache, 100) == [12, 13]
    cache.dec_lock_ref(handle)
    assert freed(cache, 100) == []
    cache.dec_lock_ref(handle)
    assert (cache.protected_size, cache.evictable_size) == (0, 4)
    assert freed(cache, 100) == [2, 3, 0, 1]


def test_lock_holds_through_a_split():
    cache = RadixCache()
    handle = put(cache, 1, 2, 3, 4).handle
    cache.inc_lock_ref(handle)
    put(cache, 1, 2, 9, first_slot=10)
    assert cache.protected_size == 4
    cache.check()
    cache.dec_lock_ref(handle)
    assert cache.protected_size == 0
    cache.check()


def test_extending_a_locked_prefix_adds_an_unlocked_leaf():
    cache = RadixCache()
    handle = put(cache, 1, 2).handle
    cache.inc_lock_ref(handle)
    put(cache, 1, 2, 3, first_slot=10)
    assert freed(cache, 9) == [12]
    cache.dec_lock_ref(handle)
    cache.check()
    assert freed(cache, 9) == [0, 1]


def test_lock_of_an_empty_match_protects_nothing():
    cache = RadixCache()
    put(cache, 1, 2)
    handle = cache.match_prefix(make_key(7)).handle
    cache.inc_lock_ref(handle)
    assert cache.protected_size == 0
    cache.dec_lock_ref(handle)
    cache.check()


def test_unlock_without_lock_is_refused_and_changes_nothing():
    cache = RadixCache()
    upper = put(cache, 1, 2).handle
    lower = put(cache, 1, 2, 3, first_slot=10).handle
    cache.inc_lock_ref(lower)
    with pytest.raises(CorruptCacheError):
        cache.dec_lock_ref(upper)
    assert cache.protected_size == 3
    cache.check()


def test_stale_and_foreign_handles_are_refused():
    cache, other = RadixCache(), RadixCache()
    dropped = put(cache, 1).handle
    cache.evict(1)
    forgotten = put(cache, 2).handle
    cache.reset()
    foreign = put(other, 1).handle
    for handle in (dropped, forgotten, foreign, other.match_prefix(make_key(9)).handle):
        with pytest.raises(CorruptCacheError):
            cache.inc_lock_ref(handle)
        with pytest.raises(CorruptCacheError):
            cache.dec_lock_ref(handle)
    cache.check()


def test_stale_handle_keeps_no_arrays_alive():
    cache = RadixCache()
    handle = put(cache, *range(100)).handle
    cache.evict(1)
    assert handle.token_ids.nbytes == handle.kv_indices.nbytes == 0


def test_reset_returns_every_slot_locked_or_not():
    cache = RadixCache()
    put(cache, 1, 2, 3)
    cache.inc_lock_ref(put(cache, 1, 2, 4, first_slot=10).handle)
    assert sorted(cache.reset().tolist()) == [0, 1, 2, 12]
    assert (cache.total_size, cache.protected_size) == (0, 0)
    assert matched(cache, 1) == []
    assert cache.reset().tolist() == []
    cache.check()


# check


def break_lock(cache, node):
    node.lock_ref += 1


def break_size(cache, node):
    cache._evictable_size += 1


def break_order(cache, node):
    oldest = cache._queue.first()
    cache._queue._move_to_end(oldest)


def break_queue(cache, node):
    cache._queue.remove(node)


def break_key(cache, node):
    node.last_access = 0


def break_slots(cache, node):
    node.kv_indices = node.parent.kv_indices[:1].copy()
    node.kv_indices.flags.writeable = False


def break_view(cache, node):
    node.kv_indices = node.kv_indices[:]


def break_parent(cache, node):
    node.parent = cache.root_handle


def break_edge(cache, node):
    node.edge = b"?"


@pytest.mark.parametrize(
    "damage",
    [
        break_lock,
        break_size,
        break_order,
        break_queue,
        break_key,
        break_slots,
        break_view,
        break_parent,
        break_edge,
    ],
)
def test_check_finds_damage(damage):
    cache = RadixCache()
    put(cache, 1, 2, 3)
    node = put(cache, 1, 2, 4, first_slot=10).handle
    put(cache, 5, first_slot=20)
    cache.check()
    damage(cache, node)
    with pytest.raises(CorruptCacheError):
        cache.check()


def test_package_needs_numpy_alone():
    code = "import sys, kvgraft.prefix; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
