"""Streaming sessions: rows and locks that live from turn to turn."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix import (
    ChunkCache,
    MatchPrefixParams,
    RadixCache,
    RadixKey,
    RequestRow,
    StreamingSession,
    SWARadixCache,
)
from kvgraft.testing.slots import CheckedSlots


class Engine:
    def __init__(self, inner=None, *, hybrid=False):
        self.cache = StreamingSession(inner or RadixCache())
        self.pool, self.swa = CheckedSlots(500), CheckedSlots(500, first=1000)
        self.running, self.hybrid = [], hybrid

    def begin(self, token_ids, session_id="s", **fields):
        req = RequestRow("r", np.asarray(token_ids), np.empty(0, np.int64), session_id=session_id, **fields)
        self.take_back(self.cache.begin_turn(req))
        self.running.append(req)
        self.check()
        return req

    def compute(self, req):
        num = len(req.token_ids) - req.committed_len
        req.grow(self.pool.alloc(num), self.swa.alloc(num) if self.hybrid else np.empty(0, np.int64))
        self.check()

    def take_back(self, result):
        self.pool.free(result.freed)
        self.swa.free(result.swa_freed)

    def end(self, req, call):
        self.running.remove(req)
        self.take_back(call(req))
        self.check()

    def finish(self, req):
        self.end(req, self.cache.cache_finished_req)

    def abort(self, req):
        self.end(req, lambda req: self.cache.cache_finished_req(req, is_insert=False))

    def turn(self, token_ids, session_id="s", **fields):
        req = self.begin(token_ids, session_id, **fields)
        self.compute(req)
        self.finish(req)

    def check(self):
        cache = self.cache
        cache.check()
        held = sum(req.committed_len - req.protected_len for req in self.running)
        total = cache.evictable_size + cache.protected_size + cache.session_held_tokens + held
        assert self.pool.available + total == self.pool.size
        if self.hybrid:
            own = sum(req.committed_len - max(req.protected_len, req.swa_evicted_len) for req in self.running)
            assert (
                self.swa.available + cache.inner.swa_total_size + cache.session_held_swa_tokens + own == self.swa.size
            )


def test_a_turn_goes_on_where_the_last_one_ended_page_tail_included():
    engine = Engine(RadixCache(16))
    engine.turn([1, 2, 3, 4, 5])
    assert (engine.cache.total_size, engine.cache.session_held_tokens) == (0, 5)
    req = engine.begin([1, 2, 3, 4, 5, 6, 7])
    assert req.committed_len == 5
    engine.compute(req)
    engine.finish(req)
    assert engine.cache.session_held_tokens == 7


def test_the_first_lock_is_kept_between_turns_and_released_once():
    engine = Engine()
    engine.turn([1, 2, 3], session_id=None)
    engine.turn([1, 2, 3, 4])
    assert engine.cache.protected_size == 3
    engine.turn([1, 2, 3, 4, 5])
    assert engine.cache.protected_size == 3
    engine.take_back(engine.cache.close_session("s"))
    engine.check()
    assert (engine.cache.protected_size, engine.cache.session_held_tokens) == (0, 0)
    assert engine.cache.close_session("s").num_tokens == 0


def test_match_gives_the_row_under_a_handle_whose_locks_do_nothing():
    engine = Engine()
    engine.turn([1, 2, 3, 4])
    req = RequestRow("r", np.array([1, 2, 3, 9]), np.empty(0, np.int64), session_id="s")
    match = engine.cache.match_prefix(MatchPrefixParams(req.key(4), req))
    assert match.prefix_len == 3
    engine.cache.inc_lock_ref(match.handle)
    engine.cache.dec_lock_ref(match.handle)
    engine.cache.dec_lock_ref(match.handle)
    assert engine.cache.protected_size == 0
    assert engine.cache.match_prefix(RadixKey([1, 2, 3])).prefix_len == 0


def test_a_departing_turn_frees_the_tail():
    engine = Engine()
    engine.turn([1, 2, 3, 4, 5])
    req = engine.begin([1, 2, 9, 9])
    assert req.committed_len == 2
    engine.compute(req)
    engine.finish(req)


def test_a_turn_that_departs_inside_the_shared_prefix_starts_afresh():
    engine = Engine()
    engine.turn([1, 2, 3], session_id=None)
    engine.turn([1, 2, 3, 4])
    req = engine.begin([1, 9, 9])
    assert (req.committed_len, req.protected_len) == (1, 1)
    engine.compute(req)
    engine.finish(req)


def test_an_abort_after_the_start_releases_all():
    engine = Engine()
    engine.turn([1, 2, 3])
    req = engine.begin([1, 2, 3, 4, 5])
    engine.compute(req)
    engine.abort(req)
    assert engine.cache.session_held_tokens == 0
    assert engine.pool.available == engine.pool.size


def test_an_abort_before_the_start_keeps_the_session():
    engine = Engine()
    engine.turn([1, 2, 3])
    req = engine.begin([1, 2, 3, 4, 5])
    engine.end(req, engine.cache.cancel_turn)
    assert engine.cache.session_held_tokens == 3
    assert engine.begin([1, 2, 3, 4]).committed_len == 3


def test_a_cancelled_turn_that_departed_leaves_nothing_of_its_own_under_the_tokens_of_the_session():
    """Slots that it took behind its point of departure hold other text, or nothing at all yet."""
    engine = Engine()
    engine.turn([1, 2, 3, 4, 5, 6])
    req = engine.begin([1, 2, 3, 9, 9, 9, 9, 9])
    engine.compute(req)
    engine.end(req, engine.cache.cancel_turn)
    assert engine.cache.session_held_tokens == 3
    again = engine.begin([1, 2, 3, 4, 5, 6, 7])
    assert again.committed_len == 3


def test_closing_while_a_turn_runs_ends_the_session_with_the_turn():
    engine = Engine()
    engine.turn([1, 2, 3])
    req = engine.begin([1, 2, 3, 4])
    assert engine.cache.close_session("s").num_tokens == 0
    engine.compute(req)
    engine.finish(req)
    assert engine.cache.session_held_tokens == 0
    assert engine.cache.match_prefix(RadixKey([1, 2, 3, 4])).prefix_len == 4


def test_turns_run_one_after_another():
    engine = Engine()
    engine.turn([1, 2])
    engine.begin([1, 2, 3])
    with pytest.raises(ConfigError, match="has a turn running"):
        engine.begin([1, 2, 4])


def test_first_turns_run_one_after_another():
    """Of two, the one that ended first would lose its row to the other: slots and a lock that nobody gives back."""
    engine = Engine()
    first = engine.begin([1, 2, 3])
    with pytest.raises(ConfigError, match="finish or abort it first"):
        engine.begin([1, 2, 3, 4])
    engine.compute(first)
    engine.finish(first)
    engine.turn([1, 2, 3, 4])


def test_closing_in_the_first_turn_ends_the_session_with_it():
    engine = Engine()
    req = engine.begin([1, 2, 3])
    engine.compute(req)
    assert not len(engine.cache.close_session("s").freed)
    engine.finish(req)
    assert engine.cache.session_held_tokens == engine.cache.protected_size == 0
    assert engine.begin([1, 2, 3, 4]).protected_len == 3


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_turn_that_ran_over_a_reset_leaves_no_session(hybrid):
    """What the reset gave back is free, and may hold another's K/V by the time the next turn begins."""
    engine = Engine(SWARadixCache(sliding_window_size=4) if hybrid else None, hybrid=hybrid)
    engine.turn([1, 2, 3])
    req = engine.begin([1, 2, 3, 4])
    engine.compute(req)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    if hybrid:
        engine.take_back(engine.cache.reset_both())
    else:
        engine.pool.free(engine.cache.reset())
    engine.running.remove(req)
    with pytest.raises(CorruptCacheError, match="match again"):
        engine.cache.cache_finished_req(req)
    assert engine.begin([1, 2, 3, 4, 5]).committed_len == 0


def test_a_turn_that_ran_over_a_reset_does_not_end_the_one_after_it():
    engine = Engine()
    old = engine.begin([1, 2, 3])
    engine.running.remove(old)
    engine.cache.reset()
    new = engine.begin([1, 2, 3])
    with pytest.raises(CorruptCacheError):
        engine.cache.cache_finished_req(old, is_insert=False)
    engine.compute(new)
    engine.finish(new)
    assert engine.cache.session_held_tokens == 3


def test_a_row_that_was_adopted_from_a_session_is_told_how_to_begin():
    engine = Engine()
    engine.turn([1, 2, 3])
    req = RequestRow("r", np.array([1, 2, 3, 4]), np.empty(0, np.int64), session_id="s")
    match = engine.cache.match_prefix(MatchPrefixParams(req.key(3), req))
    req.adopt(match, engine.cache.inc_lock_ref(match.handle))
    for call in (engine.cache.cache_unfinished_req, engine.cache.cache_finished_req):
        with pytest.raises(ConfigError, match="begin_turn"):
            call(req)
    assert engine.cache.session_held_tokens == 3


def test_a_request_that_began_as_no_turn_leaves_the_session_alone():
    engine = Engine()
    engine.turn([1, 2, 3])
    other = RequestRow("r", np.array([7]), np.empty(0, np.int64), session_id="s")
    for is_insert in (True, False):
        other.kv_indices = engine.pool.alloc(1)
        engine.take_back(engine.cache.cache_finished_req(other, is_insert=is_insert))
        engine.check()
    assert engine.begin([1, 2, 3, 4]).committed_len == 3


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_turn_that_departs_at_the_last_pair_shares_all_before_it(is_stored):
    """With bigram keys a position is the same only if the token after it is."""
    engine = Engine()
    req = engine.begin([1, 2, 3, 4, 5], is_bigram=True)
    engine.compute(req)
    if is_stored:
        engine.take_back(engine.cache.cache_unfinished_req(req))
    engine.finish(req)
    req = engine.begin([1, 2, 3, 4, 9, 9, 9], is_bigram=True)
    assert req.committed_len == 3
    engine.compute(req)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    engine.finish(req)


@pytest.mark.parametrize(("token_ids", "length"), [([1, 2, 3, 4, 5], 3), ([1, 2, 3, 8, 8, 8], 2)])
@pytest.mark.parametrize("is_cancelled", [False, True])
def test_after_a_turn_that_computed_nothing_the_last_pair_of_its_match_counts(token_ids, length, is_cancelled):
    """Its row has fewer positions than the lock below it has tokens."""
    engine = Engine()
    engine.turn([1, 2, 3, 4], None, is_bigram=True)
    req = engine.begin([1, 2, 3, 4, 5, 6], is_bigram=True)
    assert req.committed_len == req.protected_len == 3
    engine.finish(req)
    if is_cancelled:
        engine.end(engine.begin([1, 2, 3, 4, 5], is_bigram=True), engine.cache.cancel_turn)
    req = engine.begin(token_ids, is_bigram=True)
    assert req.committed_len == length
    engine.compute(req)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    engine.finish(req)


def test_a_session_of_another_namespace_is_not_reused():
    engine = Engine()
    engine.turn([1, 2, 3], extra_key="a")
    req = engine.begin([1, 2, 3, 4], extra_key="b")
    assert req.committed_len == 0


def test_requests_without_session_pass_through():
    engine = Engine()
    engine.turn([1, 2, 3], session_id=None)
    assert engine.cache.match_prefix(RadixKey([1, 2, 3])).prefix_len == 3
    assert engine.cache.supports_streaming_session()
    assert engine.cache.evict(10).num_tokens == 3


def test_chunks_inside_a_turn_are_shared_with_others():
    engine = Engine()
    req = engine.begin([1, 2, 3, 4])
    engine.compute(req)
    engine.take_back(engine.cache.cache_unfinished_req(req))
    engine.check()
    engine.finish(req)
    assert engine.cache.match_prefix(RadixKey([1, 2, 3, 4])).prefix_len == 4
    engine.take_back(engine.cache.close_session("s"))
    engine.check()


def test_reset_returns_what_idle_sessions_hold():
    engine = Engine()
    engine.turn([1, 2, 3])
    engine.pool.free(engine.cache.reset())
    assert engine.pool.available == engine.pool.size


def test_reset_returns_slots_of_both_pools():
    engine = Engine(SWARadixCache(sliding_window_size=4), hybrid=True)
    engine.turn([1, 2, 3])
    engine.turn([5, 6, 7, 8], None)
    engine.take_back(engine.cache.reset_both())
    assert engine.pool.available == engine.pool.size
    assert engine.swa.available == engine.swa.size


@pytest.mark.parametrize("inner", [ChunkCache(), SWARadixCache(sliding_window_size=4)])
def test_other_caches_can_be_wrapped(inner):
    engine = Engine(inner, hybrid=isinstance(inner, SWARadixCache))
    engine.turn(np.arange(20))
    assert engine.begin(np.arange(30)).committed_len == 20


def test_a_session_whose_windows_moved_on_cannot_go_back():
    cache = SWARadixCache(sliding_window_size=4)
    engine = Engine(cache, hybrid=True)
    req = engine.begin(np.arange(20))
    engine.compute(req)
    engine.take_back(cache.advance_window(req))
    engine.finish(req)
    assert engine.begin([*range(10), 99, 98]).committed_len == 0


@pytest.mark.parametrize("hybrid", [False, True])
def test_random_turns_keep_every_slot_in_one_place(hybrid):
    rng = np.random.default_rng(5)
    engine = Engine(SWARadixCache(2, sliding_window_size=6) if hybrid else RadixCache(2), hybrid=hybrid)
    texts = {name: [0] for name in "abc"}
    busy = {}
    for _ in range(600):
        name = "abc"[int(rng.integers(3))]
        if name in busy:
            req = busy.pop(name)
            ending = rng.integers(6)
            if ending == 0 and req.committed_len == req.num_start:
                engine.end(req.req, engine.cache.cancel_turn)
                continue
            if rng.integers(8) == 0:
                engine.cache.close_session(name)
            engine.compute(req.req)
            if hybrid:
                engine.take_back(engine.cache.inner.advance_window(req.req))
            if rng.integers(3) == 0:
                engine.take_back(engine.cache.cache_unfinished_req(req.req))
            engine.check()
            (engine.abort if ending == 1 else engine.finish)(req.req)
        else:
            text = texts[name]
            if rng.integers(4) == 0 or len(text) > 40:
                del text[int(rng.integers(1, len(text) + 1)) :]
            text += rng.integers(0, 3, int(rng.integers(1, 8))).tolist()
            busy[name] = Turn(engine.begin(list(text), name))
        if engine.pool.available < 250:
            engine.take_back(engine.cache.evict(60))
        engine.check()


class Turn:
    def __init__(self, req):
        self.req, self.num_start = req, req.committed_len

    @property
    def committed_len(self):
        return self.req.committed_len
