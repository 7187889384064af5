"""StateRadixCache by example, and one test per defect that caches of this kind have had."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.events import BlockRemoved, BlockStored, EventLog
from kvgraft.prefix import RadixKey, RequestRow, StateRadixCache, StreamingSession
from kvgraft.prefix.eviction.policies import LRU
from kvgraft.testing.slots import CheckedSlots


def put(cache, *token_ids, first_slot=0, states=None, **options):
    """Store; states are at the end, with the number of the first slot plus 1000, unless they are given."""
    if states is None:
        states = {len(token_ids): first_slot + 1000}
    slots = np.arange(first_slot, first_slot + len(token_ids))
    result = cache.insert(RadixKey(token_ids), slots, states=states, **options)
    cache.check()
    return result


def matched(cache, *token_ids):
    result = cache.match_prefix(RadixKey(token_ids))
    cache.check()
    return result.prefix_len, result.state, result.branching_len


def evict(cache, num_tokens, num_states=0):
    result = cache.evict(num_tokens, num_states)
    cache.check()
    return result.freed.tolist(), result.state_freed.tolist()


def sequence(start, num):
    return tuple(range(start, start + num))


# match


def test_a_match_ends_at_the_deepest_state_and_says_how_far_the_tokens_reach():
    cache = StateRadixCache()
    put(cache, *sequence(0, 10), states={4: 7, 10: 8})
    assert matched(cache, *sequence(0, 10)) == (10, 8, 10)
    assert matched(cache, *sequence(0, 9), 99) == (4, 7, 9)
    assert matched(cache, *sequence(0, 4), 99) == (4, 7, 4)
    assert matched(cache, *sequence(0, 3), 99) == (0, None, 3)
    assert matched(cache, 99) == (0, None, 0)


def test_a_match_cuts_no_node():
    cache = StateRadixCache()
    put(cache, *sequence(0, 10))
    matched(cache, *sequence(0, 5), 99)
    assert cache.num_nodes == 1


def test_a_state_at_the_branching_point_serves_both_branches_and_others():
    cache = StateRadixCache(page_size=2)
    put(cache, *sequence(0, 8), 20, 21)
    prompt = (*sequence(0, 8), 30, 31)
    prefix_len, state, branching_len = matched(cache, *prompt)
    assert (prefix_len, state, branching_len) == (0, None, 8)
    result = put(cache, *prompt, first_slot=50, states={branching_len: 1, 10: 2})
    assert (result.prefix_len, result.total_len, result.state_freed.tolist()) == (8, 10, [])
    assert matched(cache, *sequence(0, 8), 40, 41) == (8, 1, 8)
    assert matched(cache, *sequence(0, 8), 20, 21) == (10, 1000, 10)


def test_the_branching_point_is_an_end_of_page_and_chunk():
    cache = StateRadixCache(page_size=4, state_chunk_size=6)
    assert cache.state_alignment == 12
    put(cache, *sequence(0, 24))
    assert matched(cache, *sequence(0, 23), 99) == (0, None, 12)
    assert matched(cache, *sequence(0, 11), 99) == (0, None, 0)


def test_namespaces_share_no_state():
    cache = StateRadixCache()
    put(cache, 1, 2, 3)
    assert cache.match_prefix(RadixKey([1, 2, 3], "other")).prefix_len == 0
    assert cache.match_prefix(RadixKey([1, 2, 3], None, "salt")).prefix_len == 0


def test_the_handle_of_a_match_names_its_state():
    cache = StateRadixCache()
    result = put(cache, 1, 2, 3, states={3: 5})
    assert cache.state_of(result.handle) == 5
    match = cache.match_prefix(RadixKey([1, 2, 3, 4]))
    assert cache.state_of(match.handle) == cache.state_of(cache.inc_lock_ref(match.handle)) == 5
    assert cache.state_of(cache.root_handle) is None


# insert


def test_tokens_are_stored_up_to_the_last_state():
    cache = StateRadixCache(page_size=2)
    result = put(cache, *sequence(0, 9), states={4: 1, 6: 2})
    assert (result.prefix_len, result.total_len) == (0, 6)
    assert cache.total_size == 6
    assert cache.path_slots(result.handle).tolist() == [0, 1, 2, 3, 4, 5]


def test_without_a_state_nothing_is_stored():
    cache = StateRadixCache()
    result = put(cache, *sequence(0, 9), states={})
    assert (result.prefix_len, result.total_len, cache.total_size) == (0, 0, 0)
    lock = cache.lock_inserted(put(cache, 1, 2, 3).handle)
    assert put(cache, 1, 2, 3, 4, after=lock, states={}).total_len == 3


def test_a_state_that_fits_no_page_and_chunk_comes_back_like_the_tail_of_a_page():
    cache = StateRadixCache(page_size=4, state_chunk_size=8)
    result = put(cache, *sequence(0, 20), states={4: 1, 8: 2, 13: 3, 20: 4})
    assert (result.total_len, result.state_freed.tolist()) == (8, [1, 3, 4])
    assert cache.state_total_size == 1


def test_a_state_that_is_recorded_already_comes_back():
    cache = StateRadixCache()
    put(cache, *sequence(0, 6), states={3: 1, 6: 2})
    result = put(cache, *sequence(0, 8), first_slot=20, states={3: 3, 6: 4, 8: 5})
    assert (result.prefix_len, result.total_len, result.state_freed.tolist()) == (6, 8, [3, 4])
    assert matched(cache, *sequence(0, 3)) == (3, 1, 3)


def test_a_tombstone_takes_a_state_and_keeps_its_slots():
    cache = StateRadixCache()
    put(cache, 1, 2, 3)
    put(cache, 1, 2, 3, 4, first_slot=10)
    matched(cache, 1, 2, 3, 4)
    assert evict(cache, 0, 1) == ([], [1000])
    assert matched(cache, 1, 2, 3) == (0, None, 3)
    result = put(cache, 1, 2, 3, first_slot=20)
    assert (result.prefix_len, result.state_freed.tolist()) == (3, [])
    match = cache.match_prefix(RadixKey([1, 2, 3]))
    assert (match.kv_indices.tolist(), match.state) == ([0, 1, 2], 1020)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({0: 1}, "a state after 0 tokens does not fit a key of 3"),
        ({4: 1}, "a state after 4 tokens does not fit a key of 3"),
        ({3: 1, -2: 1}, "a state after -2 tokens"),
    ],
)
def test_positions_outside_the_key_are_refused_and_nothing_changes(states, message):
    cache = StateRadixCache()
    with pytest.raises(ConfigError, match=message):
        put(cache, 1, 2, 3, states=states)
    assert cache.total_size == 0


def test_positions_before_the_handle_are_refused():
    cache = StateRadixCache()
    lock = cache.lock_inserted(put(cache, 1, 2, 3).handle)
    with pytest.raises(ConfigError, match="a state after 2 tokens does not fit a key of 4, stored after 3"):
        put(cache, 1, 2, 3, 4, after=lock, states={2: 1})


def test_a_handle_of_another_prefix_is_refused():
    cache = StateRadixCache()
    handle = put(cache, 1, 2, 3).handle
    with pytest.raises(ConfigError, match="not a beginning of the key"):
        put(cache, 1, 2, 4, 5, after=handle)


@pytest.mark.parametrize("size", [0, -1])
def test_chunks_have_at_least_one_token(size):
    with pytest.raises(ConfigError, match=f"state_chunk_size must be at least 1, not {size}"):
        StateRadixCache(state_chunk_size=size)


def test_bigram_keys():
    cache = StateRadixCache()
    key = RadixKey([1, 2, 3, 4], is_bigram=True)
    assert cache.insert(key, np.arange(3), states={3: 9}).total_len == 3
    assert cache.match_prefix(RadixKey([1, 2, 3, 4, 5], is_bigram=True)).state == 9
    assert cache.match_prefix(RadixKey([1, 2, 3, 5], is_bigram=True)).branching_len == 2
    cache.check()


# eviction


def test_the_two_orders():
    """Example of the specification: leaves go with their states, states of inner nodes alone."""
    cache = StateRadixCache()
    put(cache, 1, 2, 3)
    put(cache, *sequence(1, 7), first_slot=10)
    put(cache, 10, 11, 12, first_slot=20)
    put(cache, 1, 2, 3, 4, 5, 60, 70, first_slot=30)
    assert (cache.evictable_size, cache.state_evictable_size) == (12, 4)
    assert evict(cache, 1) == ([15, 16], [1010])
    assert evict(cache, 0, 1) == ([], [1000])
    assert evict(cache, 1, 2) == ([20, 21, 22, 35, 36, 13, 14, 0, 1, 2], [1020, 1030])
    assert (cache.total_size, cache.state_total_size) == (0, 0)


def test_a_match_refreshes_its_own_state_and_none_above():
    cache = StateRadixCache()
    put(cache, *sequence(0, 6), states={2: 1, 4: 2, 6: 3})
    put(cache, 50, 51, first_slot=10)
    matched(cache, *sequence(0, 6))
    assert evict(cache, 0, 2) == ([], [1, 2])
    assert matched(cache, *sequence(0, 6)) == (6, 3, 6)


def test_of_one_insert_the_state_nearest_to_the_root_leaves_first():
    cache = StateRadixCache(policy="fifo")
    put(cache, *sequence(0, 6), states={2: 1, 6: 3, 4: 2})
    assert evict(cache, 0, 1) == ([], [1])
    assert evict(cache, 0, 1) == ([], [2])


def test_a_leaf_whose_state_goes_takes_tombstones_above_with_it():
    cache = StateRadixCache()
    put(cache, *sequence(0, 6), states={2: 1, 4: 2, 6: 3})
    cache.evict(0, 2)
    assert evict(cache, 0, 1) == ([4, 5, 2, 3, 0, 1], [3])


def test_a_tombstone_with_another_branch_stays():
    cache = StateRadixCache()
    put(cache, 1, 2, 3, 4)
    put(cache, 1, 2, 5, 6, first_slot=10)
    assert cache.state_total_size == 2
    assert evict(cache, 0, 1) == ([2, 3], [1000])
    assert matched(cache, 1, 2, 5, 6) == (4, 1010, 4)


def test_evicting_tokens_counts_their_states():
    cache = StateRadixCache()
    put(cache, 1, 2)
    put(cache, 3, 4, first_slot=10)
    assert evict(cache, 1, 1) == ([0, 1], [1000])


@pytest.mark.parametrize(
    ("policy", "expected"), [("lru", 1), ("mru", 2), ("fifo", 1), ("filo", 3), ("lfu", 2), ("priority", 3)]
)
def test_the_policy_orders_states_by_their_own_facts(policy, expected):
    """State 1 was used first, 2 last and once less than the others; 3 is the newest with the lowest priority."""
    cache = StateRadixCache(policy=policy)
    for number, priority in ((1, 2), (2, 2), (3, 1)):
        put(cache, number, first_slot=100 * number, states={1: number}, priority=priority)
        put(cache, number, 9, first_slot=10 * number, states={2: number + 10}, priority=9)
    held = [cache.inc_lock_ref(cache.match_prefix(RadixKey([number, 9])).handle) for number in (1, 2, 3)]
    for number in (1, 3, 2):
        lock = cache.inc_lock_ref(cache.match_prefix(RadixKey([number])).handle)
        cache.dec_lock_ref(lock)
        if number != 2:
            cache.dec_lock_ref(cache.inc_lock_ref(cache.match_prefix(RadixKey([number])).handle))
    freed, states = evict(cache, 0, 1)
    assert (freed, states) == ([], [expected])
    assert len(held) == 3


# locks


def test_a_lock_holds_the_path_and_one_state():
    cache = StateRadixCache()
    put(cache, *sequence(0, 6), states={2: 1, 4: 2, 6: 3})
    lock = cache.inc_lock_ref(cache.match_prefix(RadixKey(sequence(0, 4))).handle)
    assert (cache.protected_size, cache.state_protected_size) == (4, 1)
    assert evict(cache, 100, 100) == ([4, 5], [3, 1])
    cache.dec_lock_ref(lock)
    assert (cache.protected_size, cache.state_protected_size, cache.state_evictable_size) == (0, 0, 1)


def test_two_receipts_on_one_state():
    cache = StateRadixCache()
    handle = put(cache, 1, 2).handle
    first, second = cache.inc_lock_ref(handle), cache.inc_lock_ref(handle)
    cache.dec_lock_ref(first)
    assert evict(cache, 100, 100) == ([], [])
    cache.dec_lock_ref(second)
    assert evict(cache, 0, 100) == ([0, 1], [1000])


def test_a_state_released_early_may_leave_while_its_tokens_stay():
    cache = StateRadixCache()
    lock = cache.inc_lock_ref(put(cache, 1, 2, 3).handle)
    cache.dec_state_lock_only(lock)
    cache.check()
    assert (cache.protected_size, cache.state_evictable_size) == (3, 1)
    assert evict(cache, 100, 1) == ([], [1000])
    assert matched(cache, 1, 2, 3) == (0, None, 3)
    with pytest.raises(CorruptCacheError, match="holds no state"):
        cache.dec_state_lock_only(lock)


def test_a_leaf_without_state_goes_when_its_last_use_ends():
    """SGLang kept it, counted as evictable, and failed when it was to be evicted."""
    cache = StateRadixCache()
    handle = put(cache, 1, 2, 3).handle
    first, second = cache.inc_lock_ref(handle), cache.inc_lock_ref(handle)
    for lock in (first, second):
        cache.dec_state_lock_only(lock)
    evict(cache, 0, 1)
    assert not len(cache.dec_lock_ref(first).freed)
    cache.check()
    assert cache.dec_lock_ref(second).freed.tolist() == [0, 1, 2]
    assert cache.total_size == 0
    cache.check()


def test_a_tombstone_that_lost_its_branches_under_a_lock_goes_with_it():
    """The other way into the same state: the tombstone is inside when it loses its state, and a leaf later."""
    cache = StateRadixCache()
    put(cache, *sequence(0, 4), states={2: 1, 4: 2})
    lock = cache.inc_lock_ref(cache.match_prefix(RadixKey(sequence(0, 2))).handle)
    cache.dec_state_lock_only(lock)
    assert evict(cache, 0, 1) == ([2, 3], [2])
    assert evict(cache, 0, 1) == ([], [1])
    assert cache.evictable_size == 0
    assert cache.dec_lock_ref(lock).freed.tolist() == [0, 1]


def test_a_state_that_was_evicted_between_match_and_lock_is_refused():
    cache = StateRadixCache()
    put(cache, 1, 2)
    put(cache, 1, 2, 3, first_slot=10)
    handle = cache.match_prefix(RadixKey([1, 2])).handle
    matched(cache, 1, 2, 3)
    assert evict(cache, 0, 1) == ([], [1000])
    with pytest.raises(CorruptCacheError, match="match again"):
        cache.inc_lock_ref(handle)
    cache.check()
    assert cache.protected_size == 0


def test_a_split_under_a_lock_leaves_the_state_with_the_lower_part():
    cache = StateRadixCache()
    lock = cache.inc_lock_ref(put(cache, *sequence(0, 6)).handle)
    put(cache, *sequence(0, 3), 50, first_slot=10)
    assert (cache.protected_size, cache.state_protected_size) == (6, 1)
    assert evict(cache, 100, 100) == ([13], [1010])
    assert matched(cache, *sequence(0, 6)) == (6, 1000, 6)
    cache.dec_lock_ref(lock)
    cache.check()


def test_receipts_are_good_once():
    cache = StateRadixCache()
    lock = cache.inc_lock_ref(put(cache, 1, 2).handle)
    cache.dec_lock_ref(lock)
    for call in (cache.dec_lock_ref, cache.dec_state_lock_only):
        with pytest.raises(CorruptCacheError, match="not a receipt"):
            call(lock)
    with pytest.raises(CorruptCacheError, match="not a receipt"):
        cache.dec_lock_ref(cache.match_prefix(RadixKey([1, 2])).handle)
    cache.check()


def test_the_empty_prefix_can_be_locked_and_has_no_state():
    cache = StateRadixCache()
    lock = cache.inc_lock_ref(cache.root_handle)
    assert not lock.state_locked
    with pytest.raises(CorruptCacheError, match="holds no state"):
        cache.dec_state_lock_only(lock)
    assert not len(cache.dec_lock_ref(lock).freed)
    cache.check()


# reset, events, memory


def test_reset_returns_both_kinds_of_slots():
    cache = StateRadixCache()
    cache.inc_lock_ref(put(cache, *sequence(0, 4), states={2: 1, 4: 2}).handle)
    result = cache.reset_both()
    assert (sorted(result.freed.tolist()), sorted(result.state_freed.tolist())) == ([0, 1, 2, 3], [1, 2])
    assert (cache.state_total_size, cache.total_size) == (0, 0)
    cache.check()
    put(cache, 1, 2)
    assert cache.reset().tolist() == [0, 1]


def test_a_disabled_cache_returns_every_state():
    cache = StateRadixCache(disabled=True)
    assert put(cache, 1, 2, 3, states={1: 5, 3: 6}).state_freed.tolist() == [5, 6]
    assert matched(cache, 1, 2, 3) == (0, None, 0)


def test_events_follow_tokens():
    """One store per node, none when a state leaves, one remove with the tokens."""
    log = EventLog()
    cache = StateRadixCache(events=log)
    put(cache, 1, 2)
    put(cache, 1, 2, 3, first_slot=10)
    stored = log.take()
    assert {type(event) for event in stored} == {BlockStored}
    assert sum(len(event.block_hashes) for event in stored) == 3
    matched(cache, 1, 2, 3)
    evict(cache, 0, 1)
    assert log.take() == []
    evict(cache, 0, 1)
    removed = log.take()
    assert {type(event) for event in removed} == {BlockRemoved}
    assert sum(len(event.block_hashes) for event in removed) == 3


def test_a_dropped_node_holds_no_state():
    cache = StateRadixCache()
    handle = put(cache, 1, 2).handle
    evict(cache, 2)
    assert handle.component is None
    with pytest.raises(CorruptCacheError, match="match again"):
        cache.state_of(handle)


def test_a_policy_of_ones_own_orders_states_too():
    class Deepest(LRU):
        def __call__(self, node):
            return -node.start

    cache = StateRadixCache(policy=Deepest())
    put(cache, *sequence(0, 4), states={2: 1, 4: 2})
    assert evict(cache, 0, 1) == ([2, 3], [2])


def test_no_provider_and_no_session():
    cache = StateRadixCache()
    cache.set_semantic_provider(None)
    with pytest.raises(ConfigError, match="takes no semantic provider"):
        cache.set_semantic_provider(object())
    with pytest.raises(ConfigError, match="keeps no state to go on from"):
        StreamingSession(cache)


def damage_state_of_leaf(cache, node):
    cache._components.free(node.component)


def damage_position(cache, node):
    cache._alignment = 3


def damage_slot(cache, node):
    node.component.slot = next(iter(cache._tree.root.children.values())).component.slot


def damage_locks(cache, node):
    node.component.lock_ref = 1


def damage_owner(cache, node):
    node.component.node = node.parent


def damage_count(cache, node):
    cache._components.evictable_size += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_state_of_leaf, "leaf"),
        (damage_position, "no end of a page and chunk"),
        (damage_slot, "slot is stored twice"),
        (damage_locks, "more locks than its node"),
        (damage_owner, "belongs to another node|out of order|not the policy's"),
        (damage_count, "counted as"),
    ],
)
def test_check_finds_damage(damage, message):
    cache = StateRadixCache()
    handle = put(cache, *sequence(0, 4), states={2: 1, 4: 2}).handle
    damage(cache, handle)
    with pytest.raises(CorruptCacheError, match=message):
        cache.check()


# requests


class Engine:
    """The least that an engine of a hybrid model does around a cache: it copies states, and frees what comes back."""

    def __init__(self, **options):
        self.cache = StateRadixCache(**options)
        self.slots, self.states = CheckedSlots(500), CheckedSlots(50, first=1000)

    def begin(self, token_ids):
        req = RequestRow("r", np.asarray(token_ids), np.empty(0, np.int64), prompt_len=len(token_ids))
        match = self.cache.match_prefix(req.key(len(token_ids) - 1))
        req.adopt(match, self.cache.inc_lock_ref(match.handle))
        return req

    def compute(self, req, stop, *, record=True):
        req.grow(self.slots.alloc(stop - req.committed_len))
        if record:
            req.record_state(stop, int(self.states.alloc(1)[0]))

    def take_back(self, result):
        self.slots.free(result.freed)
        self.states.free(result.state_freed)

    def check(self, *running):
        self.cache.check()
        own = sum(req.committed_len - req.protected_len for req in running)
        assert self.slots.available + self.cache.total_size + own == self.slots.size
        own_states = sum(len(req.states) for req in running)
        assert self.states.available + self.cache.state_total_size + own_states == self.states.size


def test_a_request_stores_its_chunks_and_its_end():
    engine = Engine()
    req = engine.begin(sequence(0, 20))
    for stop in (8, 16, 20):
        engine.compute(req, stop)
        engine.take_back(engine.cache.cache_unfinished_req(req))
        assert req.protected_len == stop
        engine.check(req)
    req.token_ids = np.arange(25)
    engine.compute(req, 25)
    engine.take_back(engine.cache.cache_finished_req(req))
    engine.check()
    assert engine.cache.state_total_size == 4
    assert engine.cache.match_prefix(RadixKey(np.arange(30))).prefix_len == 25
    assert engine.cache.match_prefix(RadixKey(np.arange(19))).prefix_len == 16


def test_a_chunk_without_a_state_stays_with_its_request():
    engine = Engine()
    req = engine.begin(sequence(0, 20))
    engine.compute(req, 8, record=False)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    assert (req.protected_len, engine.cache.total_size) == (0, 0)
    engine.compute(req, 16)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    assert req.protected_len == 16
    engine.compute(req, 20, record=False)
    engine.take_back(engine.cache.cache_finished_req(req))
    engine.check()
    assert engine.cache.total_size == 16


def test_of_two_requests_with_one_prompt_the_second_gets_its_slots_and_states_back():
    engine = Engine()
    first, second = engine.begin(sequence(0, 10)), engine.begin(sequence(0, 10))
    for req in (first, second):
        engine.compute(req, 6)
        engine.compute(req, 10)
    engine.take_back(engine.cache.cache_unfinished_req(first))
    engine.take_back(engine.cache.cache_unfinished_req(second))
    assert first.kv_indices.tolist() == second.kv_indices.tolist()
    engine.check(first, second)
    assert engine.states.available == 48
    for req in (first, second):
        engine.take_back(engine.cache.cache_finished_req(req))
    engine.check()


@pytest.mark.parametrize("skip_insert", [False, True])
def test_an_aborted_request_gets_everything_back(skip_insert):
    engine = Engine()
    req = engine.begin(sequence(0, 10))
    engine.compute(req, 6)
    if not skip_insert:
        engine.take_back(engine.cache.cache_unfinished_req(req))
    engine.compute(req, 10)
    req.skip_insert = skip_insert
    engine.take_back(engine.cache.cache_finished_req(req, is_insert=skip_insert))
    engine.check()
    assert engine.cache.total_size == (0 if skip_insert else 6)
    assert not req.states


def test_a_disabled_cache_returns_the_states_of_a_request():
    engine = Engine(disabled=True)
    req = engine.begin(sequence(0, 10))
    engine.compute(req, 10)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    assert list(req.states) == [10]
    engine.take_back(engine.cache.cache_finished_req(req))
    engine.check()


def test_a_state_that_fits_no_chunk_is_returned_at_the_end_with_the_tokens_after_the_last_one():
    engine = Engine(state_chunk_size=8)
    req = engine.begin(sequence(0, 20))
    engine.compute(req, 16)
    engine.compute(req, 20)
    engine.take_back(engine.cache.cache_finished_req(req))
    engine.check()
    assert (engine.cache.total_size, engine.cache.state_total_size) == (16, 1)


def test_a_bigram_row_keeps_the_state_of_the_token_that_has_no_element():
    engine = Engine()
    req = RequestRow("r", np.arange(10), np.empty(0, np.int64), is_bigram=True)
    req.adopt(engine.cache.match_prefix(req.key(9)), engine.cache.inc_lock_ref(engine.cache.root_handle))
    engine.compute(req, 9)
    engine.compute(req, 10)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    assert (req.protected_len, list(req.states)) == (9, [10])
    engine.take_back(engine.cache.cache_finished_req(req))
    engine.check()


def test_a_request_counts_one_hit_however_many_chunks_it_stores():
    engine = Engine()
    req = engine.begin(sequence(0, 20))
    for stop in (8, 16, 20):
        engine.compute(req, stop)
        engine.take_back(engine.cache.cache_unfinished_req(req))
    assert {node.hit_count for node in list(engine.cache.root_handle.subtree())[1:]} == {1}


@pytest.mark.parametrize("position", [0, 5, 21])
def test_a_row_takes_no_state_where_it_has_no_kv_of_its_own(position):
    engine = Engine()
    req = engine.begin(sequence(0, 30))
    engine.compute(req, 6)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    engine.compute(req, 20, record=False)
    with pytest.raises(ConfigError, match=f"a state after {position} tokens does not fit the row"):
        req.record_state(position, 1)


def test_a_row_takes_one_state_per_position():
    engine = Engine()
    req = engine.begin(sequence(0, 30))
    engine.compute(req, 6)
    with pytest.raises(ConfigError, match="has a state after 6 tokens already"):
        req.record_state(6, 1)


def test_a_row_that_is_taken_over_shorter_gives_its_later_states_back():
    engine = Engine()
    req = engine.begin(sequence(0, 30))
    engine.compute(req, 6)
    engine.compute(req, 12)
    later = RequestRow("s", np.arange(30), np.empty(0, np.int64))
    engine.take_back(later.take_over(req, 8))
    assert list(later.states) == [6]
    assert not req.states
    engine.take_back(engine.cache.cache_finished_req(later))
    engine.check()
