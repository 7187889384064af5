"""Each eviction policy by example, and what is said when one does not exist."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError
from kvgraft.prefix import EVICTION_POLICIES, RadixCache, RadixKey, SWARadixCache, make_eviction_policy
from kvgraft.testing.prefix_suite import SlotOwner


def put(cache, *token_ids, priority=0):
    return cache.insert(RadixKey(token_ids), priority=priority)


def order(cache):
    """First tokens of the leaves in the order in which they leave."""
    left = []
    while cache.total_size:
        left.append(int(cache.evict(1).freed[0]))
        cache.check()
    return left


def make_cache(policy, **config):
    return RadixCache.create_simulated(policy=policy, policy_config=config)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lru", [2, 3, 1]), ("mru", [1, 3, 2]), ("fifo", [1, 2, 3]), ("filo", [3, 2, 1]), ("lfu", [2, 3, 1])],
)
def test_three_leaves_of_which_the_first_is_used_again(policy, expected):
    cache = make_cache(policy)
    for first in (1, 2, 3):
        put(cache, first, first)
    put(cache, 1, 1)
    assert order(cache) == expected


def test_lfu_counts_hits_and_breaks_ties_by_age():
    cache = make_cache("lfu")
    for first in (1, 2, 3, 1, 1, 2):
        put(cache, first)
    put(cache, 4)
    assert order(cache) == [3, 4, 2, 1]


def test_priority_keeps_the_largest_of_a_path():
    cache = make_cache("priority")
    put(cache, 1, priority=5)
    put(cache, 2, priority=1)
    put(cache, 3)
    put(cache, 2, priority=9)
    put(cache, 1, priority=0)
    assert order(cache) == [3, 1, 2]


def test_slru_protects_what_was_hit_often_enough():
    cache = make_cache("slru", protected_threshold=3)
    put(cache, 1)
    put(cache, 1)
    put(cache, 1)
    put(cache, 2)
    put(cache, 3)
    assert order(cache) == [2, 3, 1]


def test_tlru_lets_go_first_what_the_next_turn_can_compute_in_time():
    cache = make_cache("tlru", threshold=8, next_prompt_estimate=2)
    put(cache, *range(100, 120))  # oldest, but losing it costs 20 + 2 tokens
    put(cache, 1, 2, 3)
    put(cache, *range(200, 206))
    assert order(cache) == [1, 200, 100]


def test_tlru_counts_the_whole_history_behind_a_node():
    cache = make_cache("tlru", threshold=8, next_prompt_estimate=0)
    put(cache, 1, 2, 3, 4, 5)
    put(cache, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    put(cache, 50, *range(20))
    put(cache, 60)
    assert cache.evict(1).freed.tolist() == [6, 7, 8, 9]  # 4 to compute
    assert cache.evict(1).freed.tolist() == [60]  # the first five would make it 9
    assert cache.evict(1).freed.tolist() == [1, 2, 3, 4, 5]


def test_slru_protects_from_the_second_of_two_inserts_on():
    cache = make_cache("slru", protected_threshold=2)
    for first in (1, 1, 2, 3, 4, 4):
        put(cache, first)
    assert order(cache) == [2, 3, 1, 4]


def hits(handle):
    """Of the nodes on the path of a prefix, from the root on."""
    counts = []
    while handle.parent is not None:
        counts.append(handle.hit_count)
        handle = handle.parent
    return counts[::-1]


def test_the_insert_that_makes_a_node_counts_as_its_first_hit():
    cache = make_cache("lfu")
    assert hits(put(cache, 1, 2).handle) == [1]
    assert hits(put(cache, 1, 2, 3).handle) == [2, 1]
    assert hits(put(cache, 1, 2).handle) == [3]
    assert hits(put(cache, 1, 9).handle) == [4, 1]


def test_hits_are_counted_once_per_request():
    cache = make_cache("lfu")
    key = RadixKey(np.arange(10))
    handle = put(cache, *range(5)).handle
    grown = cache.insert(key, after=handle, counted_len=5).handle
    cache.insert(key, counted_len=10)
    assert hits(grown) == [1, 1]
    cache.insert(key)
    assert hits(grown) == [2, 2]


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_request_counts_each_node_of_its_path_once(hybrid):
    cache = SWARadixCache(1, sliding_window_size=4, policy="lfu") if hybrid else RadixCache(1, policy="lfu")
    owner = SlotOwner(cache)
    tokens = np.arange(12)
    owner.run(tokens[:4])
    req = owner.begin(tokens)
    for _ in range(4):
        owner.compute(req, 2)
        owner.take_back(cache.cache_unfinished_req(req))
    handle = req.handle.node if hybrid else req.handle
    owner.take_back(cache.cache_finished_req(req))
    assert hits(handle) == [2, 1, 1, 1, 1]
    owner.run(np.arange(13))
    assert hits(handle) == [3, 2, 2, 2, 2]
    owner.check()


@pytest.mark.parametrize("hybrid", [False, True])
def test_an_insert_behind_a_handle_that_stores_nothing_is_a_use_as_a_plain_one_is(hybrid):
    def used_again(*, behind_a_handle):
        options = {"policy": "lru", "simulated": True}
        cache = SWARadixCache(1, sliding_window_size=2, **options) if hybrid else RadixCache(1, **options)
        handle = put(cache, 1, 2).handle
        put(cache, 3, 4)
        if hybrid:
            after = {"after": handle, "prev_prefix_len": 2} if behind_a_handle else {}
        else:
            after = {"after": handle} if behind_a_handle else {}
        cache.insert(RadixKey([1, 2]), **after)
        return order(cache)

    assert used_again(behind_a_handle=False) == [3, 1]
    assert used_again(behind_a_handle=True) == [3, 1]


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_priority_of_an_insert_behind_a_handle_reaches_the_whole_path(hybrid):
    options = {"policy": "priority", "simulated": True}
    cache = SWARadixCache(1, sliding_window_size=2, **options) if hybrid else RadixCache(1, **options)
    handle = put(cache, 1, 2).handle
    cache.insert(RadixKey([1, 2, 3, 4]), after=handle, priority=5, **({"prev_prefix_len": 2} if hybrid else {}))
    put(cache, 7, 8, priority=3)
    assert order(cache) == [7, 3, 1]
    handle = put(cache, 1, 2).handle
    cache.insert(RadixKey([1, 2]), after=handle, priority=5, **({"prev_prefix_len": 2} if hybrid else {}))
    put(cache, 7, 8, priority=3)
    assert order(cache) == [7, 1]


def test_a_split_hands_down_hits_priority_and_protection_but_is_new():
    cache = make_cache("priority")
    lower = put(cache, 1, 2, 3, 4, priority=7).handle
    put(cache, 1, 2, 3, 4)
    cache.inc_lock_ref(lower)
    upper = cache.match_prefix(RadixKey([1, 2])).handle
    assert (upper.hit_count, upper.priority) == (lower.hit_count, lower.priority) == (2, 7)
    assert upper.created > lower.created
    assert cache.protected_size == 4
    cache.check()


@pytest.mark.parametrize("policy", sorted(EVICTION_POLICIES))
def test_every_policy_frees_everything_and_stays_sound(policy):
    rng = np.random.default_rng(3)
    cache = RadixCache(2, policy=policy)
    next_slot = 0
    for step in range(400):
        token_ids = rng.integers(0, 3, int(rng.integers(1, 14)))
        cache.insert(RadixKey(token_ids), np.arange(next_slot, next_slot + len(token_ids)), priority=step % 4)
        next_slot += len(token_ids)
        if step % 5 == 0:
            cache.evict(6)
        cache.check()
    assert len(cache.evict(10**9).freed)
    assert cache.total_size == 0


def test_a_split_moves_what_begins_later_to_its_new_place():
    """`tlru` looks at where a node begins: what is left of it after a match of its first tokens may go in time."""
    cache = make_cache("tlru", threshold=5, next_prompt_estimate=0)
    put(cache, *range(10))
    put(cache, *range(20, 30))
    cache.match_prefix(RadixKey(range(20, 26)))
    cache.check()
    assert cache.evict(1).freed.tolist() == [26, 27, 28, 29]


def test_an_unknown_policy_is_told_what_there_is():
    with pytest.raises(
        ConfigError, match="unknown eviction policy 'lur'; there are fifo, filo, lfu, lru, mru, priority"
    ):
        RadixCache(policy="lur")


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("lru", {"a": 1}, "has no parameter 'a'; it has none"),
        ("slru", {"threshold": 1}, "it has protected_threshold"),
        ("slru", {"protected_threshold": 0}, "at least 1, not 0"),
        ("slru", {"protected_threshold": "2"}, "must be an integer, not '2'"),
        ("tlru", {"threshold": True}, "must be an integer"),
        ("tlru", {"next_prompt_estimate": -1}, "at least 0"),
    ],
)
def test_bad_parameters_are_told_what_there_is(name, config, message):
    with pytest.raises(ConfigError, match=message):
        make_eviction_policy(name, config)


def test_config_goes_with_a_name_only():
    with pytest.raises(ConfigError, match="goes with a policy's name"):
        RadixCache(policy=make_eviction_policy("lru"), policy_config={"a": 1})
