"""Requests through a cache: chunks, duplicates, tails, locks. After each step every slot is in one place."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix import RadixCache, RadixKey, RequestRow, StateRadixCache, SWARadixCache
from kvgraft.testing.slots import CheckedSlots


class Engine:
    """The least an owner of a pool does."""

    def __init__(self, page_size=1, size=256, **options):
        self.cache = RadixCache(page_size, **options)
        self.pool = CheckedSlots(size)
        self.running = []

    def start(self, token_ids, *, rid="r", **fields):
        req = RequestRow(rid, np.asarray(token_ids), np.empty(0, np.int64), **fields)
        match = self.cache.match_prefix(req.key(max(len(token_ids) - 1, 0)))
        req.adopt(match, self.cache.inc_lock_ref(match.handle))
        self.running.append(req)
        return req

    def compute(self, req, upto):
        req.grow(self.pool.alloc(upto - req.committed_len))
        self.check()

    def unfinished(self, req):
        self.pool.free(self.cache.cache_unfinished_req(req).freed)
        self.check()

    def finish(self, req, **options):
        self.running.remove(req)
        self.pool.free(self.cache.cache_finished_req(req, **options).freed)
        self.check()

    def check(self):
        self.cache.check()
        held = sum(req.committed_len - req.protected_len for req in self.running)
        assert self.pool.available + self.cache.total_size + held == self.pool.size


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_chunked_prefill_ends_as_one_prefill_would(page_size):
    engine = Engine(page_size)
    prompt = np.arange(100)
    req = engine.start(prompt, prompt_len=100)
    for upto in (30, 37, 64, 100):
        engine.compute(req, upto)
        engine.unfinished(req)
        assert req.protected_len == upto // page_size * page_size
    engine.finish(req)
    assert engine.cache.protected_size == 0
    assert engine.cache.match_prefix(RadixKey(prompt)).prefix_len == 100 // page_size * page_size


def test_a_chunk_continues_at_its_handle():
    cache = RadixCache()
    first = cache.insert(RadixKey(np.arange(10)), np.arange(10))
    second = cache.insert(RadixKey(np.arange(15)), np.arange(15), after=first.handle)
    assert (second.prefix_len, second.total_len) == (10, 15)
    again = cache.insert(RadixKey(np.arange(10)), np.arange(10), after=first.handle)
    assert (again.prefix_len, again.total_len, again.handle) == (10, 10, first.handle)
    cache.check()


def test_continuing_after_a_split_is_the_same_prefix():
    cache = RadixCache()
    handle = cache.insert(RadixKey(np.arange(10)), np.arange(10)).handle
    cache.match_prefix(RadixKey([0, 1, 2, 99]))
    assert cache.insert(RadixKey(np.arange(12)), np.arange(12), after=handle).prefix_len == 10
    cache.check()


def test_a_handle_of_another_prefix_is_refused():
    cache = RadixCache()
    handle = cache.insert(RadixKey([1, 2, 3]), np.arange(3)).handle
    with pytest.raises(ConfigError, match="not a beginning of the key"):
        cache.insert(RadixKey([1, 2, 9, 9]), np.arange(4), after=handle)
    with pytest.raises(ConfigError, match="not a beginning of the key"):
        cache.insert(RadixKey([1, 2]), np.arange(2), after=handle)
    cache.evict(3)
    with pytest.raises(CorruptCacheError, match="match again"):
        cache.insert(RadixKey([1, 2, 3]), np.arange(3), after=handle)


@pytest.mark.parametrize("other", [{"cache_salt": "b"}, {"extra_key": "b"}, {"is_bigram": True}])
@pytest.mark.parametrize(
    ("cache", "stored", "more"),
    [
        (RadixCache, {}, {}),
        (StateRadixCache, {"states": {3: 0}}, {"states": {4: 1}}),
        (
            lambda: SWARadixCache(sliding_window_size=4),
            {"swa_indices": np.arange(3)},
            {"swa_indices": np.arange(4), "prev_prefix_len": 3},
        ),
    ],
)
def test_a_handle_of_another_namespace_is_refused(cache, stored, more, other):
    """What hung below it would be found by the other tenant."""
    cache, namespace = cache(), {"cache_salt": "a"}
    handle = cache.insert(RadixKey([7, 7, 7], **namespace), np.arange(3), **stored).handle
    key = RadixKey([7] * (4 + ("is_bigram" in other)), **{**namespace, **other})
    with pytest.raises(ConfigError, match="not a beginning of the key"):
        cache.insert(key, np.arange(4), after=handle, **more)
    assert cache.total_size == 3


def test_cost_of_a_chunk_does_not_depend_on_the_prefix():
    """Counted, not timed: a continued chunk looks at its own edge and at nothing in front."""
    cache = RadixCache()
    handle, token_ids = None, np.arange(64 * 50)
    looked_up = []
    original = cache._tree.descend
    cache._tree.descend = lambda key, node, length: looked_up.append(node.end) or original(key, node, length)
    for end in range(64, len(token_ids) + 1, 64):
        handle = cache.insert(RadixKey(token_ids[:end]), np.arange(end), after=handle).handle
    assert looked_up == list(range(0, len(token_ids), 64))


def test_lock_of_a_continued_chunk_stops_at_the_protected_prefix():
    cache = RadixCache()
    handle = cache.inc_lock_ref(cache.insert(RadixKey([1, 2]), np.arange(2)).handle)
    lower = cache.insert(RadixKey([1, 2, 3]), np.arange(3), after=handle).handle
    cache.inc_lock_ref(lower)
    cache.dec_lock_ref(handle)
    assert cache.protected_size == 3
    assert handle.lock_ref == 1
    cache.check()
    cache.dec_lock_ref(lower)
    assert cache.protected_size == 0
    cache.check()


def test_duplicates_of_a_racing_request_come_back_and_the_row_is_repointed():
    engine = Engine()
    one, two = engine.start([1, 2, 3, 4], rid="one"), engine.start([1, 2, 3, 4], rid="two")
    engine.compute(one, 4)
    engine.compute(two, 4)
    engine.unfinished(one)
    engine.unfinished(two)
    assert two.kv_indices.tolist() == one.kv_indices.tolist()
    engine.finish(one)
    engine.finish(two)
    assert engine.cache.total_size == 4


def test_row_does_not_alias_what_the_cache_holds():
    """#34644: a row that aliases cached slots is written through."""
    engine = Engine()
    req = engine.start([1, 2, 3, 4])
    engine.compute(req, 3)
    engine.unfinished(req)
    stored = req.kv_indices[:3].tolist()
    req.kv_indices[:3] = -1
    assert engine.cache.match_prefix(RadixKey([1, 2, 3])).kv_indices.tolist() == stored


def test_freed_slots_do_not_alias_the_row():
    """#34067: what is freed later must not change with the row."""
    engine = Engine()
    one, two = engine.start([1, 2, 3], rid="one"), engine.start([1, 2, 3], rid="two")
    engine.compute(one, 3)
    engine.compute(two, 3)
    engine.unfinished(one)
    own = two.kv_indices.tolist()
    freed = engine.cache.cache_unfinished_req(two).freed
    two.kv_indices[:] = 0
    assert freed.tolist() == own


def test_page_tail_stays_with_a_running_request_and_is_returned_at_the_end():
    engine = Engine(4)
    req = engine.start(list(range(10)))
    engine.compute(req, 10)
    engine.unfinished(req)
    assert (req.protected_len, req.committed_len) == (8, 10)
    engine.finish(req)
    assert engine.cache.total_size == 8


def test_prompt_and_output_are_cut_at_the_prompt_boundary():
    engine = Engine(policy="priority")
    req = engine.start([1, 2, 3, 4], prompt_len=4, priority=3)
    req.token_ids = np.array([1, 2, 3, 4, 5, 6, 7])
    engine.compute(req, 7)
    engine.finish(req)
    assert len(engine.cache.evict(1).freed) == 3
    match = engine.cache.match_prefix(RadixKey([1, 2, 3, 4, 5]))
    assert match.prefix_len == 4
    assert match.handle.priority == 4


def test_abort_returns_everything_the_request_owned():
    engine = Engine()
    engine.finish(_computed(engine, [1, 2, 3]))
    req = engine.start([1, 2, 3, 4, 5])
    assert req.protected_len == 3
    engine.compute(req, 5)
    engine.finish(req, is_insert=False)
    assert engine.cache.total_size == 3
    assert engine.cache.protected_size == 0


@pytest.mark.parametrize("call", ["cache_unfinished_req", "cache_finished_req"])
@pytest.mark.parametrize("cache", [RadixCache, StateRadixCache, lambda: SWARadixCache(sliding_window_size=4)])
def test_nothing_of_a_request_that_began_before_a_reset_is_stored(cache, call):
    """Not even where it matched nothing: its K/V may be of a model that is gone, and its slots are still its own."""
    cache, prompt = cache(), np.arange(6)
    req = RequestRow("r", prompt, np.empty(0, np.int64))
    match = cache.match_prefix(req.key(5))
    req.adopt(match, cache.inc_lock_ref(match.handle))
    req.grow(np.arange(6), np.arange(6) if isinstance(cache, SWARadixCache) else np.empty(0, np.int64))
    if isinstance(cache, StateRadixCache):
        req.record_state(6, 9)
    cache.reset()
    with pytest.raises(CorruptCacheError, match="match again"):
        getattr(cache, call)(req)
    assert cache.total_size == 0
    assert req.own_slots(0).freed.tolist() == [0, 1, 2, 3, 4, 5]
    assert len(req.states) == isinstance(cache, StateRadixCache)


def _computed(engine, token_ids):
    req = engine.start(token_ids)
    engine.compute(req, len(token_ids))
    return req


def test_skip_insert_is_honoured_between_chunks_and_at_the_end():
    engine = Engine()
    req = engine.start([1, 2, 3, 4], skip_insert=True)
    engine.compute(req, 2)
    engine.unfinished(req)
    engine.compute(req, 4)
    engine.finish(req)
    assert engine.cache.total_size == 0


def test_a_disabled_cache_keeps_nothing():
    engine = Engine(disabled=True)
    req = _computed(engine, [1, 2, 3])
    engine.unfinished(req)
    engine.finish(req)
    assert engine.cache.total_size == 0
    assert engine.pool.available == engine.pool.size


def test_bigram_view_has_no_element_for_the_last_token():
    """#11231: off by one."""
    engine = Engine()
    req = engine.start([1, 2, 3, 4], is_bigram=True)
    engine.compute(req, 4)
    engine.unfinished(req)
    assert (req.protected_len, req.committed_len) == (3, 4)
    engine.finish(req)
    assert engine.cache.total_size == 3
    key = RadixKey([1, 2, 3, 4, 9], is_bigram=True)
    assert engine.cache.match_prefix(key).prefix_len == 3
    assert engine.cache.match_prefix(RadixKey([1, 2, 9], is_bigram=True)).prefix_len == 1
    assert engine.cache.match_prefix(RadixKey([1, 2, 3, 4])).prefix_len == 0
    engine.check()


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_random_requests_keep_every_slot_in_one_place(page_size):
    rng = np.random.default_rng(page_size)
    engine = Engine(page_size, size=400)
    for _ in range(600):
        action = rng.integers(5)
        if action == 0 and len(engine.running) < 5:
            bigram, length = bool(rng.integers(2)), int(rng.integers(1, 30))
            engine.start(rng.integers(0, 3, length), is_bigram=bigram, prompt_len=int(rng.integers(1, length + 1)))
        elif engine.running:
            req = engine.running[int(rng.integers(len(engine.running)))]
            if action in (1, 2):
                engine.compute(req, min(len(req.token_ids), req.committed_len + int(rng.integers(8))))
            elif action == 3:
                engine.unfinished(req)
            else:
                engine.finish(req, is_insert=bool(rng.integers(4)))
        if engine.pool.available < 200:
            engine.pool.free(engine.cache.evict(50).freed)
            engine.check()
    for req in list(engine.running):
        engine.finish(req)
    assert engine.cache.protected_size == 0
