"""SWARadixCache by example, and one test per bug that SGLang's has had."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.events import EventLog
from kvgraft.prefix import RadixKey, RequestRow, SWARadixCache
from kvgraft.testing.slots import CheckedSlots
from kvgraft.windows import SlidingWindow

SWA = 1000
"""Window slots in these tests are the full-attention slots plus this."""


def make_cache(window=4, page_size=1, **options):
    return SWARadixCache(page_size, sliding_window_size=window, **options)


def put(cache, *token_ids, first_slot=0, **options):
    slots = np.arange(first_slot, first_slot + len(token_ids))
    result = cache.insert(RadixKey(token_ids), slots, swa_indices=slots + SWA, **options)
    cache.check()
    return result


def matched(cache, *token_ids):
    result = cache.match_prefix(RadixKey(token_ids))
    cache.check()
    return result.prefix_len


def evict(cache, num_tokens, swa_num_tokens=0):
    result = cache.evict(num_tokens, swa_num_tokens)
    cache.check()
    return result.freed.tolist(), (result.swa_freed - SWA).tolist()


def sequence(start, num):
    return tuple(range(start, start + num))


# match


def test_the_example_of_the_specification():
    cache = make_cache(window=4)
    put(cache, 1, 2, 3)
    put(cache, *sequence(1, 7), first_slot=10)
    put(cache, 10, 11, 12, first_slot=20)
    put(cache, 1, 2, 3, 4, 5, 60, 70, first_slot=30)
    assert evict(cache, 1) == ([15, 16], [15, 16])
    assert evict(cache, 0, 1) == ([], [0, 1, 2])
    assert evict(cache, 1, 2) == ([20, 21, 22], [20, 21, 22])
    assert matched(cache, 1, 2, 3, 4, 5) == 0
    assert matched(cache, 1, 2, 3, 4, 5, 60, 70) == 7


def test_a_prefix_shorter_than_the_window_that_reaches_the_root_matches():
    cache = make_cache(window=64)
    put(cache, 1, 2, 3)
    assert matched(cache, 1, 2, 3, 4) == 3
    assert matched(cache, 1, 2, 9) == 2


def test_a_run_behind_a_tombstone_must_be_a_whole_window():
    """#17061: the run starts anew at a tombstone."""
    cache = make_cache(window=4)
    put(cache, *sequence(0, 10), swa_evicted_len=4)
    assert matched(cache, *sequence(0, 10)) == 10
    assert matched(cache, *sequence(0, 8), 99) == 8
    assert matched(cache, *sequence(0, 7), 99) == 0
    assert matched(cache, *sequence(0, 3)) == 0


def test_the_deepest_point_in_front_of_a_gap_is_taken():
    cache = make_cache(window=2)
    put(cache, *sequence(0, 4))
    put(cache, *sequence(0, 8), first_slot=10)
    cache.match_prefix(RadixKey(sequence(0, 8)))
    lower = cache.insert(RadixKey((*sequence(0, 8), 50)), np.arange(30, 39), swa_indices=np.arange(30, 39) + SWA)
    middle = lower.handle.parent
    cache._components.free(middle.component)
    cache.check()
    assert matched(cache, *sequence(0, 8)) == 4
    assert matched(cache, *sequence(0, 8), 50) == 4


def test_match_gives_slots_of_both_pools_with_gaps():
    cache = make_cache(window=2)
    put(cache, *sequence(0, 6), swa_evicted_len=3)
    result = cache.match_prefix(RadixKey(sequence(0, 6)))
    assert result.kv_indices.tolist() == list(range(6))
    assert result.swa_indices.tolist() == [-1, -1, -1, SWA + 3, SWA + 4, SWA + 5]


def test_a_match_that_is_not_accepted_changes_nothing():
    cache = make_cache(window=4)
    put(cache, *sequence(0, 10), swa_evicted_len=4)
    nodes = cache.num_nodes
    assert matched(cache, 0, 1, 99) == 0
    assert matched(cache, *sequence(0, 6), 99) == 0
    assert cache.num_nodes == nodes


@pytest.mark.parametrize("page_size", [1, 4])
def test_bigram_keys(page_size):
    """#11231."""
    cache = make_cache(window=4, page_size=page_size)
    slots = np.arange(12)
    cache.insert(RadixKey(np.arange(13), is_bigram=True), slots, swa_indices=slots + SWA)
    cache.check()
    assert cache.match_prefix(RadixKey(np.arange(10), is_bigram=True)).prefix_len == 9 // page_size * page_size
    cache.check()


# insert and heal


def test_new_tail_is_a_tombstone_and_a_live_leaf():
    cache = make_cache(window=2)
    result = put(cache, *sequence(0, 8), swa_evicted_len=5)
    assert (result.prefix_len, result.total_len) == (0, 8)
    assert (cache.total_size, cache.swa_total_size, cache.num_nodes) == (8, 3, 2)


def test_nothing_live_is_not_inserted():
    cache = make_cache(window=2)
    result = put(cache, *sequence(0, 8), swa_evicted_len=8)
    assert (result.prefix_len, result.total_len, cache.total_size) == (0, 0, 0)


def test_full_attention_is_kept_when_the_leaf_lies_outside_the_window():
    """#29351: the part below the frontier keeps its full-attention slots."""
    cache = make_cache(window=2)
    put(cache, *sequence(0, 8), swa_evicted_len=6)
    assert cache.match_prefix(RadixKey(sequence(0, 8))).kv_indices.tolist() == list(range(8))


def tombstone(cache, token_ids, *tail):
    """Store `token_ids` as a tombstone in front of a live tail."""
    put(cache, *token_ids, *tail, swa_evicted_len=len(token_ids))


def test_heal_of_a_whole_tombstone():
    cache = make_cache(window=2)
    tombstone(cache, sequence(0, 4), 90, 91)
    result = put(cache, *sequence(0, 4), first_slot=10)
    assert result.freed.tolist() == [10, 11, 12, 13]
    assert result.swa_freed.tolist() == []
    found = cache.match_prefix(RadixKey(sequence(0, 4)))
    assert found.kv_indices.tolist() == [0, 1, 2, 3]
    assert found.swa_indices.tolist() == [SWA + 10, SWA + 11, SWA + 12, SWA + 13]


def test_heal_of_the_part_behind_the_frontier():
    cache = make_cache(window=2)
    tombstone(cache, sequence(0, 6), 90, 91)
    result = put(cache, *sequence(0, 6), first_slot=10, swa_evicted_len=2)
    assert result.freed.tolist() == list(range(10, 16))
    assert result.swa_freed.tolist() == []
    assert cache.swa_path_slots(result.handle).tolist() == [-1, -1, SWA + 12, SWA + 13, SWA + 14, SWA + 15]
    assert matched(cache, *sequence(0, 6)) == 6
    assert matched(cache, *sequence(0, 3)) == 0


def test_a_tombstone_below_the_frontier_stays():
    """#29350, #30845: freed window slots must never appear as live."""
    cache = make_cache(window=2)
    tombstone(cache, sequence(0, 4), 90, 91)
    result = put(cache, *sequence(0, 4), first_slot=10, swa_evicted_len=4)
    assert result.freed.tolist() == [10, 11, 12, 13]
    assert cache.swa_path_slots(result.handle).tolist() == [-1] * 4


def test_a_live_node_returns_what_is_offered_above_the_frontier_only():
    cache = make_cache(window=2)
    put(cache, *sequence(0, 6))
    result = put(cache, *sequence(0, 6), first_slot=10, swa_evicted_len=4)
    assert result.freed.tolist() == list(range(10, 16))
    assert result.swa_freed.tolist() == [SWA + 14, SWA + 15]


def test_healing_never_frees_full_attention_in_use():
    """#29352: a request that holds the prefix goes on reading the same slots."""
    cache = make_cache(window=2)
    put(cache, *sequence(0, 4))
    match = cache.match_prefix(RadixKey(sequence(0, 4)))
    lock = cache.inc_lock_ref(match.handle)
    cache.dec_swa_lock_only(lock)
    result = put(cache, *sequence(0, 4), first_slot=10)
    assert result.freed.tolist() == [10, 11, 12, 13]
    assert cache.path_slots(result.handle).tolist() == match.kv_indices.tolist()
    cache.dec_lock_ref(lock)
    cache.check()


def test_a_healed_window_is_freed_once():
    """#27586: neither a stale mapping nor a second free."""
    cache, pool = make_cache(window=2), CheckedSlots(64)
    for _ in range(6):
        slots = pool.alloc(8)
        result = cache.insert(RadixKey(sequence(0, 8)), slots, swa_indices=slots)
        pool.free(result.freed)  # window slots have the same numbers here and stay with the cache or come back
        held = set(cache.swa_path_slots(result.handle).tolist()) - {-1}
        assert len(held) == 8
        assert not held & set(result.swa_freed.tolist())
        cache.evict(0, 3)
        cache.check()
        cache.reset()
        pool = CheckedSlots(64)


def test_prev_prefix_len_leaves_what_is_below_alone():
    cache = make_cache(window=2)
    handle = put(cache, *sequence(0, 4)).handle
    garbage = np.array([-9] * 4 + [14, 15])
    result = cache.insert(RadixKey(sequence(0, 6)), garbage, swa_indices=garbage, prev_prefix_len=4, after=handle)
    assert (result.freed.tolist(), result.swa_freed.tolist(), result.prefix_len) == ([], [], 4)
    assert cache.path_slots(result.handle).tolist() == [0, 1, 2, 3, 14, 15]


def test_prev_prefix_len_must_be_stored_and_a_boundary():
    cache = make_cache(window=2)
    put(cache, *sequence(0, 4))
    slots = np.arange(6)
    with pytest.raises(CorruptCacheError, match="lies inside a node"):
        cache.insert(RadixKey(sequence(0, 6)), slots, swa_indices=slots, prev_prefix_len=2)
    with pytest.raises(CorruptCacheError, match="5 tokens are said to be stored, 4 are"):
        cache.insert(RadixKey(sequence(0, 6)), slots, swa_indices=slots, prev_prefix_len=5)


@pytest.mark.parametrize(("window", "page_size", "tail"), [(3, 2, 4), (5, 4, 8)])
def test_leaf_cap_cuts_one_window_in_whole_pages(window, page_size, tail):
    cache = make_cache(window, page_size, leaf_cap=True)
    leaf = put(cache, *sequence(0, 24)).handle
    assert len(leaf) == tail
    assert matched(cache, *sequence(0, 24)) == 24
    lock = cache.inc_lock_ref(leaf)
    assert (cache.protected_size, cache.swa_protected_size) == (24, tail)
    cache.dec_lock_ref(lock)
    assert (cache.protected_size, cache.swa_protected_size) == (0, 0)
    short = make_cache(window, page_size, leaf_cap=True)
    put(short, *sequence(0, tail))
    assert short.num_nodes == 1


def test_namespaces_and_int32_slots():
    """#11452: slots of any integer type become int64."""
    cache = make_cache()
    slots = np.arange(3, dtype=np.int32)
    cache.insert(RadixKey([1, 2, 3], "a"), slots, swa_indices=slots)
    assert matched(cache, 1, 2, 3) == 0
    found = cache.match_prefix(RadixKey([1, 2, 3], "a"))
    assert (found.kv_indices.dtype, found.swa_indices.dtype) == (np.int64, np.int64)


def test_arguments_that_do_not_fit_are_refused():
    cache = make_cache(page_size=4)
    slots = np.arange(8)
    with pytest.raises(ConfigError, match="insert needs kv_indices"):
        cache.insert(RadixKey(sequence(0, 8)), slots)
    with pytest.raises(ConfigError, match="multiples of the page size 4"):
        cache.insert(RadixKey(sequence(0, 8)), slots, swa_indices=slots, swa_evicted_len=2)
    handle = put(cache, *sequence(0, 8)).handle
    with pytest.raises(ConfigError, match="after prev_prefix_len 4"):
        cache.insert(RadixKey(sequence(0, 8)), slots, swa_indices=slots, prev_prefix_len=4, after=handle)
    with pytest.raises(ConfigError, match="sliding_window_size"):
        make_cache(window=0)
    for sizes in ({}, {"sliding_window_size": 4, "attention_chunk_size": 4}, {"attention_chunk_size": 0}):
        with pytest.raises(ConfigError, match="attention_chunk_size"):
            SWARadixCache(**sizes)
    with pytest.raises(ConfigError, match="semantic"):
        cache.set_semantic_provider(object())


# locks


def test_a_lock_covers_full_attention_to_the_root_and_one_window():
    cache = make_cache(window=3)
    for end in (4, 8, 12):
        put(cache, *sequence(0, end), first_slot=end * 10)
    lock = cache.inc_lock_ref(cache.match_prefix(RadixKey(sequence(0, 12))).handle)
    assert (cache.protected_size, cache.swa_protected_size) == (12, 4)
    assert evict(cache, 100, 100) == ([], sorted([*range(40, 44), *range(84, 88)]))
    assert cache.total_size == 12
    cache.dec_lock_ref(lock)
    cache.check()


def test_a_cut_marks_nothing_and_loses_nothing():
    cache = SWARadixCache(4, sliding_window_size=8)
    key = RadixKey(np.arange(24))
    cache.insert(key, np.arange(24), swa_indices=np.arange(24) + 100)
    before = [(node.last_access, node.component.last_access) for node in cache.root_handle.children.values()]
    for position in (0, 3, 15, 15, 24, 99):
        cache.cut(key, position)
        cache.check()
    cache.cut(RadixKey([0, 1, 2, 3, 9, 9, 9, 9]), 8)  # not stored so far
    nodes = [node for node in cache.root_handle.subtree() if len(node)]
    assert [node.end for node in nodes] == [12, 24]
    assert [(node.last_access, node.component.last_access) for node in nodes] == before * 2
    assert cache.inc_lock_ref(cache.match_prefix(key).handle).swa_start == 12


def test_a_split_moves_the_border_of_a_lock_with_it():
    cache = make_cache(window=8)
    lock = cache.inc_lock_ref(put(cache, *sequence(0, 10)).handle)
    matched(cache, 0, 1, 2, 99)
    matched(cache, 0, 1, 2, 3, 4, 99)
    assert cache.swa_protected_size == 10
    cache.dec_lock_ref(lock)
    assert (cache.swa_protected_size, cache.protected_size) == (0, 0)
    cache.check()


def test_early_release_frees_the_leaf_and_uncovers_the_rest():
    cache = make_cache(window=4)
    put(cache, 0, 1)
    lock = cache.inc_lock_ref(put(cache, 0, 1, 2, 3, first_slot=10).handle)
    result = cache.dec_swa_lock_only(lock)
    cache.check()
    assert (result.swa_freed - SWA).tolist() == [12, 13]
    assert (cache.protected_size, cache.swa_protected_size, cache.swa_evictable_size) == (4, 0, 2)
    with pytest.raises(CorruptCacheError, match="released before"):
        cache.dec_swa_lock_only(lock)
    gone = cache.dec_lock_ref(lock)
    cache.check()
    assert gone.freed.tolist() == [12, 13]
    assert cache.total_size == 2


def test_receipts_are_good_once():
    cache = make_cache()
    lock = cache.inc_lock_ref(put(cache, 1, 2).handle)
    cache.dec_lock_ref(lock)
    for call in (cache.dec_lock_ref, cache.dec_swa_lock_only):
        with pytest.raises(CorruptCacheError, match="not a receipt"):
            call(lock)
    with pytest.raises(CorruptCacheError, match="not a receipt"):
        cache.dec_lock_ref(cache.root_handle)


def test_a_handle_whose_window_went_is_refused():
    cache = make_cache(window=2)
    handle = put(cache, 1, 2).handle
    put(cache, 1, 2, 3, 4, first_slot=10)
    cache.evict(0, 1)
    with pytest.raises(CorruptCacheError, match="window of this prefix was evicted"):
        cache.inc_lock_ref(handle)
    cache.check()


# eviction


def test_windows_leave_root_side_first_and_become_tombstones():
    cache = make_cache(window=4)
    put(cache, *sequence(0, 4))
    put(cache, *sequence(0, 8), first_slot=10)
    assert evict(cache, 0, 1) == ([], [0, 1, 2, 3])
    assert matched(cache, *sequence(0, 8)) == 8
    assert matched(cache, *sequence(0, 4)) == 0


def test_a_leaf_takes_tombstones_above_with_it_and_all_counts():
    """Freed tokens of ancestors count in both phases."""
    cache = make_cache(window=2)
    put(cache, *sequence(0, 8), swa_evicted_len=6)
    assert evict(cache, 1) == ([6, 7, 0, 1, 2, 3, 4, 5], [6, 7])
    put(cache, *sequence(0, 8), swa_evicted_len=6)
    assert evict(cache, 0, 1) == ([6, 7, 0, 1, 2, 3, 4, 5], [6, 7])
    assert cache.total_size == 0


def test_the_window_of_a_locked_leaf_goes_alone():
    cache = make_cache(window=2)
    put(cache, 1, 2)
    lock = cache.inc_lock_ref(put(cache, 1, 2, 3, 4, first_slot=10).handle)
    cache.dec_swa_lock_only(lock)
    put(cache, 1, 2, 3, 4, first_slot=20)
    assert evict(cache, 100, 100) == ([], [0, 1, 22, 23])
    assert cache.total_size == 4


def test_recency_is_a_counter():
    """#12111: ties of a wall clock broke the order."""
    cache = make_cache(window=1)
    for index in range(50):
        put(cache, index, first_slot=index)
    assert [evict(cache, 1)[0] for _ in range(50)] == [[index] for index in range(50)]


def test_dead_windows_are_not_kept_hot():
    """#26615: a match refreshes windows only as deep as one window reaches."""
    cache = make_cache(window=2)
    for end in (2, 4, 6):
        put(cache, *sequence(0, end), first_slot=end * 10)
    put(cache, 90, 91, first_slot=0)
    matched(cache, *sequence(0, 6))
    assert evict(cache, 0, 4) == ([], [20, 21, 42, 43])


def test_a_broken_window_goes_before_whole_ones_of_other_branches():
    """#35515: one eviction in the tail window makes a branch unmatchable; the rest of it is worth nothing then."""
    cache = make_cache(window=6)
    for end in (2, 4, 6):
        put(cache, *sequence(0, end), first_slot=end * 10)
    put(cache, *sequence(50, 6), first_slot=0)
    matched(cache, *sequence(0, 6))
    matched(cache, *sequence(50, 6))
    assert evict(cache, 0, 1) == ([], [20, 21])
    assert matched(cache, *sequence(0, 6)) == 0
    assert evict(cache, 0, 4)[1] == [42, 43, 64, 65]
    assert matched(cache, *sequence(50, 6)) == 6


def test_split_halves_own_their_memory():
    """#17191: a view keeps the whole tensor alive."""
    cache = make_cache()
    lower = put(cache, *sequence(0, 100)).handle
    upper = cache.match_prefix(RadixKey(sequence(0, 10))).handle
    for node, length in ((upper, 10), (lower, 90)):
        assert node.kv_indices.base is None
        assert node.component.swa_indices.base is None
        assert node.component.swa_indices.nbytes == 8 * length


def test_dropped_nodes_are_freed_without_a_garbage_collection():
    """#25770: reference cycles kept dropped nodes alive."""

    cache = make_cache()
    handle = put(cache, *sequence(0, 4)).handle
    window = weakref.ref(handle.component.swa_indices)
    gc.disable()
    try:
        del handle
        cache.evict(100)
        assert window() is None
    finally:
        gc.enable()


def test_reset_returns_both_pools():
    cache = make_cache(window=2)
    put(cache, *sequence(0, 8), swa_evicted_len=6)
    result = cache.reset_both()
    assert (sorted(result.freed.tolist()), sorted(result.swa_freed.tolist())) == (list(range(8)), [SWA + 6, SWA + 7])
    cache.check()


def test_events_follow_full_attention():
    log = EventLog()
    cache = make_cache(window=2, events=log)
    put(cache, *sequence(0, 8), swa_evicted_len=4)
    (stored,) = log.take()
    assert stored.token_ids == sequence(0, 8)
    put(cache, *sequence(0, 4), first_slot=20)  # heals
    cache.match_prefix(RadixKey(sequence(0, 8)))
    assert cache.evict(0, 2).num_tokens == 0
    assert log.take() == []
    cache.evict(100)
    (removed,) = log.take()
    assert set(removed.block_hashes) == set(stored.block_hashes)


# the frontier


@pytest.mark.parametrize(
    ("num_tokens", "window", "page_size", "expected"),
    [(11, 2, 8, 0), (10, 2, 8, 0), (16, 2, 8, 8), (10, 4, 1, 6), (3, 4, 1, 0), (10, 3, 2, 6), (40, 17, 16, 0)],
)
def test_the_frontier_never_reaches_the_last_leaf(num_tokens, window, page_size, expected):
    """#22470, #29860, #34870."""
    frontier = SlidingWindow(window).frontier(num_tokens, page_size)
    assert frontier == expected
    assert num_tokens // page_size * page_size - frontier >= min(window, num_tokens // page_size * page_size)


# requests


class Engine:
    """Both pools and the requests that run on them."""

    def __init__(self, page_size, window, size=400, **options):
        self.cache = SWARadixCache(page_size, sliding_window_size=window, **options)
        self.full, self.swa = CheckedSlots(size), CheckedSlots(size, first=SWA)
        self.running = []

    def start(self, token_ids, **fields):
        req = RequestRow("r", np.asarray(token_ids), np.empty(0, np.int64), **fields)
        match = self.cache.match_prefix(req.key(max(len(token_ids) - 1, 0)))
        req.adopt(match, self.cache.inc_lock_ref(match.handle))
        self.running.append(req)
        self.check()
        return req

    def compute(self, req, upto):
        num = upto - req.committed_len
        req.grow(self.full.alloc(num), self.swa.alloc(num))
        self.check()

    def take_back(self, result):
        self.full.free(result.freed)
        self.swa.free(result.swa_freed)
        self.check()

    def finish(self, req, **options):
        self.running.remove(req)
        self.take_back(self.cache.cache_finished_req(req, **options))

    def check(self):
        cache = self.cache
        cache.check()
        own = sum(req.committed_len - req.protected_len for req in self.running)
        own_swa = sum(req.committed_len - max(req.protected_len, req.swa_evicted_len) for req in self.running)
        assert self.full.available + cache.total_size + own == self.full.size
        assert self.swa.available + cache.swa_total_size + own_swa == self.swa.size
        for req in self.running:
            first = max(0, cache.window.first_key(req.committed_len))
            assert (req.swa_indices[first:] >= 0).all(), "a request lost its window"


def test_decode_frees_what_leaves_the_window():
    engine = Engine(1, 8)
    req = engine.start(np.arange(200), prompt_len=40)
    engine.compute(req, 40)
    engine.take_back(engine.cache.advance_window(req))
    assert engine.swa.size - engine.swa.available == 8
    for upto in range(41, 200):
        engine.compute(req, upto)
        engine.take_back(engine.cache.advance_window(req))
        assert engine.swa.size - engine.swa.available == 8
    engine.finish(req)
    assert (engine.cache.total_size, engine.cache.swa_total_size) == (199, 8)
    assert engine.cache.match_prefix(RadixKey(np.arange(200))).prefix_len == 199


def test_the_window_of_the_prefix_is_released_once_decoding_is_past_it():
    engine = Engine(1, 4)
    first = engine.start([1, 2, 3, 4, 5, 6])
    engine.compute(first, 6)
    engine.finish(first)
    req = engine.start([1, 2, 3, 4, 5, 6, *range(10, 20)])
    assert engine.cache.swa_protected_size == 6
    engine.compute(req, 9)
    engine.take_back(engine.cache.advance_window(req))
    assert engine.cache.swa_protected_size == 6
    engine.compute(req, 10)
    engine.take_back(engine.cache.advance_window(req))
    assert (engine.cache.swa_protected_size, engine.cache.swa_total_size) == (0, 0)
    engine.finish(req)
    assert engine.cache.total_size == 10


def test_chunks_of_an_unfinished_request_pass_their_frontier():
    """#29350: window slots freed between chunks are not stored as live."""
    engine = Engine(2, 4)
    req = engine.start(np.arange(64))
    for upto in (16, 32, 48, 64):
        engine.compute(req, upto)
        engine.take_back(engine.cache.advance_window(req))
        engine.take_back(engine.cache.cache_unfinished_req(req))
        assert req.protected_len == upto
    engine.finish(req)
    assert engine.cache.match_prefix(RadixKey(np.arange(64))).prefix_len == 64


def test_an_abort_returns_both_rows():
    engine = Engine(4, 8)
    req = engine.start(np.arange(50))
    engine.compute(req, 37)
    engine.take_back(engine.cache.advance_window(req))
    engine.finish(req, is_insert=False)
    assert (engine.full.available, engine.swa.available) == (engine.full.size, engine.swa.size)


def test_a_row_without_window_slots_is_refused():
    cache = make_cache()
    req = RequestRow("r", np.arange(4), np.arange(4))
    with pytest.raises(ConfigError, match="4 full-attention and 0 sliding-window slots"):
        cache.cache_finished_req(req)


@pytest.mark.parametrize("page_size", [1, 2, 8])
@pytest.mark.parametrize("window", [1, 3, 8, 20])
@pytest.mark.parametrize("is_bigram", [False, True])
def test_random_requests_keep_every_slot_in_one_place(page_size, window, is_bigram):
    rng = np.random.default_rng(page_size * 100 + window)
    engine = Engine(page_size, window, size=600, leaf_cap=bool(window % 2))
    for _ in range(250):
        action = rng.integers(6)
        if action == 0 and len(engine.running) < 5:
            length = int(rng.integers(1, 60))
            token_ids = np.repeat(rng.integers(0, 2, length), page_size)[:80]
            engine.start(token_ids, is_bigram=is_bigram, prompt_len=int(rng.integers(1, length + 1)))
        elif engine.running:
            req = engine.running[int(rng.integers(len(engine.running)))]
            if action in (1, 2):
                engine.compute(req, min(len(req.token_ids), req.committed_len + int(rng.integers(12))))
            elif action == 3:
                engine.take_back(engine.cache.advance_window(req))
            elif action == 4:
                engine.take_back(engine.cache.cache_unfinished_req(req))
            else:
                engine.finish(req, is_insert=bool(rng.integers(4)))
        if engine.full.available < 300 or engine.swa.available < 300 or rng.integers(10) == 0:
            engine.take_back(engine.cache.evict(int(rng.integers(40)), int(rng.integers(60))))
    for req in list(engine.running):
        engine.finish(req)
    assert engine.cache.protected_size == engine.cache.swa_protected_size == 0


# chunks


def chunked(size=8, page_size=1, **options):
    return SWARadixCache(page_size, attention_chunk_size=size, **options)


def test_behind_a_tombstone_a_prefix_is_usable_at_the_border_of_a_chunk():
    cache = chunked()
    put(cache, *sequence(0, 30), swa_evicted_len=29)
    assert [matched(cache, *sequence(0, n), 99) for n in (7, 8, 9, 15, 16, 23, 24, 29)] == [0, 8, 8, 8, 16, 16, 24, 24]
    assert matched(cache, *sequence(0, 30)) == 24, "its chunk begins at 24 and lost most of its windows"
    cache.check()


def test_behind_a_tombstone_a_chunk_is_usable_as_far_as_it_is_live():
    cache = chunked()
    put(cache, *sequence(0, 30), swa_evicted_len=16)
    assert [matched(cache, *sequence(0, n), 99) for n in (15, 16, 17, 23, 24, 30)] == [8, 16, 17, 23, 24, 30]


def test_pages_that_do_not_divide_a_chunk_are_cut_where_both_end():
    cache = chunked(6, page_size=4)
    put(cache, *sequence(0, 32), swa_evicted_len=28)
    assert [matched(cache, *sequence(0, n)) for n in (8, 12, 20, 24, 28)] == [0, 12, 12, 24, 24]
    assert matched(cache, *sequence(0, 32)) == 32, "its chunk begins at 30, in a page that is live"


def test_lock_at_the_border_of_a_chunk_covers_no_window():
    cache = chunked()
    put(cache, *sequence(0, 16))
    lock = cache.inc_lock_ref(cache.match_prefix(RadixKey(sequence(0, 16))).handle)
    assert (cache.protected_size, cache.swa_protected_size) == (16, 0)
    assert evict(cache, 0, 100) == ([], list(range(16)))
    assert matched(cache, *sequence(0, 16)) == 16
    cache.dec_lock_ref(lock)
    assert cache.total_size == 0, "nobody locks it, and a leaf without a window is of no use"


def test_lock_within_a_chunk_covers_it_from_its_beginning():
    cache = chunked()
    for end in (4, 8, 12, 14):
        put(cache, *sequence(0, end), first_slot=end * 20)
    cache.inc_lock_ref(cache.match_prefix(RadixKey(sequence(0, 14))).handle)
    assert cache.swa_protected_size == 6
    cache.evict(0, 100)
    assert cache.swa_total_size == 6


def test_decode_gives_a_chunk_up_at_its_border():
    engine = Engine(1, None, attention_chunk_size=8)
    req = engine.start(np.arange(100), prompt_len=20)
    engine.compute(req, 20)
    engine.take_back(engine.cache.advance_window(req))
    held = []
    for upto in range(21, 100):
        engine.compute(req, upto)
        engine.take_back(engine.cache.advance_window(req))
        held.append(engine.swa.size - engine.swa.available)
    assert held[:6] == [5, 6, 7, 1, 1, 2], "one page stays at a border, so that the leaf is alive"
    engine.finish(req)
    assert engine.cache.match_prefix(RadixKey(np.arange(100))).prefix_len == 99


def test_leaf_cap_cuts_a_leaf_at_the_border_of_its_last_chunk():
    cache = chunked(leaf_cap=True)
    put(cache, *sequence(0, 30))
    cache.inc_lock_ref(cache.match_prefix(RadixKey(sequence(0, 30))).handle)
    assert cache.swa_protected_size == 6
