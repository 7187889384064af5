"""The semantic hook: the 29 behaviours of its contract, numbered, and what makes it sound."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from kvgraft.errors import ConfigError
from kvgraft.prefix import MatchPrefixParams, RadixCache, RadixKey, RequestRow
from kvgraft.substitution import GuardedProvider, SemanticPrefixProvider, SemanticPrefixResult
from kvgraft.testing.slots import CheckedSlots
from kvgraft.types import Fidelity

DONOR = [1, 2, 3, 4, 5, 6, 7, 8]
PATIENCE_S = 60
QUERY = [9, 2, 3, 4, 5, 6, 7, 8, 30]


class Provider(SemanticPrefixProvider):
    def __init__(self, answer=None):
        self.answer = answer
        self.inits, self.misses, self.cached = [], [], []

    def on_init(self, *args, **kwargs):
        self.inits.append((args, kwargs))

    def on_prefix_miss(self, rid, token_ids):
        self.misses.append((rid, list(token_ids)))
        return self.answer() if callable(self.answer) else self.answer

    def on_request_cached(self, rid, token_ids):
        self.cached.append((rid, list(token_ids)))


def propose(token_ids=DONOR, **fields):
    return SemanticPrefixResult(token_ids, len(token_ids), **fields)


def make_request(rid="r1", token_ids=QUERY, num_slots=0, **fields):
    return RequestRow(rid, np.array(token_ids), np.arange(100, 100 + num_slots), **fields)


def make_cache(provider=None, page_size=1, *, extra_key=None, **options):
    cache = RadixCache(page_size)
    cache.insert(RadixKey(DONOR, extra_key), np.arange(len(DONOR)))
    cache.set_semantic_provider(provider, **options)
    return cache


def ask(cache, token_ids=QUERY, *, rid="r1", extra_key=None):
    return cache.match_prefix(MatchPrefixParams(RadixKey(token_ids, extra_key), make_request(rid, token_ids)))


# lifecycle


def test_01_the_provider_is_stored():
    provider = Provider()
    assert make_cache(provider).semantic.guard.provider is provider


def test_02_on_init_is_called_once_without_arguments():
    provider = Provider()
    make_cache(provider)
    assert provider.inits == [((), {})]


def test_03_none_clears_it():
    cache = make_cache(provider := Provider(propose()))
    cache.set_semantic_provider(None)
    assert cache.semantic is None
    assert ask(cache).prefix_len == 0
    assert not provider.misses


def test_04_none_on_a_fresh_cache_does_nothing():
    cache = RadixCache()
    cache.set_semantic_provider(None)
    assert cache.semantic is None


def test_05_a_replacement_gets_its_own_init():
    old, new = Provider(), Provider()
    cache = make_cache(old)
    cache.set_semantic_provider(new)
    assert (len(old.inits), len(new.inits)) == (1, 1)
    assert cache.semantic.guard.provider is new


def test_06_there_is_none_by_default():
    assert RadixCache().semantic is None


# no provider


def test_07_a_miss_is_empty():
    assert ask(make_cache()).prefix_len == 0


def test_08_a_full_hit_gives_all_slots():
    assert ask(make_cache(), DONOR).kv_indices.tolist() == list(range(8))


def test_09_a_shorter_key_hits():
    assert ask(make_cache(), DONOR[:3]).prefix_len == 3


# fallback


def test_10_an_exact_hit_asks_nobody():
    cache = make_cache(provider := Provider(propose()))
    assert ask(cache, DONOR[:4]).prefix_len == 4
    assert not provider.misses


def test_11_a_lookup_without_request_asks_nobody():
    cache = make_cache(provider := Provider(propose()))
    assert cache.match_prefix(RadixKey(QUERY)).prefix_len == 0
    assert cache.match_prefix(MatchPrefixParams(RadixKey(QUERY))).prefix_len == 0
    assert not provider.misses


def test_12_a_miss_asks_once_by_keyword():
    class ByKeyword(Provider):
        def on_prefix_miss(self, *, rid, token_ids):
            return super().on_prefix_miss(rid, token_ids)

    cache = make_cache(provider := ByKeyword())
    ask(cache, rid="abc")
    assert provider.misses == [("abc", QUERY)]


def test_13_ids_are_those_before_page_alignment():
    cache = make_cache(provider := Provider(), page_size=4)
    ask(cache, QUERY)
    assert provider.misses[0][1] == QUERY


def test_14_no_proposal_is_a_miss():
    assert ask(make_cache(Provider(None))).prefix_len == 0


def test_15_stored_alternate_tokens_are_a_hit():
    cache = make_cache(provider := Provider(propose()))
    result = ask(cache)
    assert result.kv_indices.tolist() == list(range(8))
    assert [rid for rid, _ in provider.misses] == ["r1"]


def test_16_alternate_tokens_that_are_not_stored_are_a_miss():
    assert ask(make_cache(Provider(propose([70, 71])))).prefix_len == 0


@pytest.mark.parametrize(("extra_key", "found"), [("lora", 8), (None, 0), ("other", 0)])
def test_17_donors_are_looked_up_in_the_namespace_of_the_query(extra_key, found):
    cache = make_cache(Provider(propose()), extra_key="lora")
    assert ask(cache, extra_key=extra_key).prefix_len == found


def test_17b_salt_is_part_of_the_namespace():
    cache = make_cache(Provider(propose()))
    key = RadixKey(QUERY, None, "tenant")
    assert cache.match_prefix(MatchPrefixParams(key, make_request())).prefix_len == 0


def fail():
    raise RuntimeError("index is down")


def test_18_exceptions_reach_the_caller_without_a_deadline():
    with pytest.raises(RuntimeError, match="index is down"):
        ask(make_cache(Provider(fail)))


@pytest.mark.parametrize(("source_id", "expected"), [("doc-7", 1), ("", 0)])
def test_19_20_a_named_source_is_logged_an_unnamed_one_is_not(caplog, source_id, expected):
    cache = make_cache(Provider(propose(source_id=source_id)))
    with caplog.at_level(logging.DEBUG, "kvgraft.prefix.semantic_fallback"):
        ask(cache)
    records = [record for record in caplog.records if "semantic hit" in record.message]
    assert len(records) == expected
    assert all(source_id in record.message for record in records)


# _match_prefix_exact


def test_21_exact_full_hit():
    assert make_cache(Provider())._match_prefix_exact(RadixKey(DONOR)).prefix_len == 8


def test_22_exact_miss():
    assert make_cache(Provider())._match_prefix_exact(RadixKey(QUERY)).prefix_len == 0


def test_23_exact_never_asks():
    cache = make_cache(provider := Provider(propose()))
    cache._match_prefix_exact(RadixKey(QUERY))
    assert not provider.misses


# on_request_cached


def test_24_a_finished_request_is_announced_once_by_keyword():
    class ByKeyword(Provider):
        def on_request_cached(self, *, rid, token_ids):
            super().on_request_cached(rid, token_ids)

    cache = make_cache(provider := ByKeyword())
    cache.cache_finished_req(make_request("x", [50, 51], 2))
    assert provider.cached == [("x", [50, 51])]


def test_25_not_without_insert():
    cache = make_cache(provider := Provider())
    cache.cache_finished_req(make_request("x", [50, 51], 2), is_insert=False)
    cache.cache_finished_req(make_request("x", [50, 51], 2, skip_insert=True))
    assert not provider.cached


def test_26_no_provider_no_error():
    assert make_cache().cache_finished_req(make_request("x", [50, 51], 2)).num_tokens == 0


def test_27_exactly_the_committed_tokens():
    cache = make_cache(provider := Provider(), page_size=4)
    cache.cache_finished_req(make_request("x", list(range(50, 60)), 6))
    assert provider.cached == [("x", list(range(50, 56)))]


# several requests


def test_28_every_miss_asks_again():
    cache = make_cache(provider := Provider())
    ask(cache)
    ask(cache)
    assert len(provider.misses) == 2


def test_29_after_a_replacement_only_the_new_one_is_asked():
    old, new = Provider(), Provider()
    cache = make_cache(old)
    cache.set_semantic_provider(new)
    ask(cache)
    assert (len(old.misses), len(new.misses)) == (0, 1)


# soundness


def test_a_hit_is_marked_and_classed_by_position():
    result = ask(make_cache(Provider(propose(source_id="d"))))
    assert result.substituted
    assert result.skip_insert
    assert result.source_id == "d"
    assert [(s.start, s.length, s.fidelity) for s in result.spans] == [
        (0, 1, Fidelity.SUBSTITUTED),
        (1, 7, Fidelity.SHIFTED),
    ]


def test_a_hit_is_clipped_so_that_the_last_token_is_computed():
    cache = make_cache(Provider(propose()))
    assert ask(cache, [9, 2, 3]).prefix_len == 2
    assert ask(cache, [9]).prefix_len == 0
    cache.set_semantic_provider(Provider(SemanticPrefixResult(DONOR, 3)))
    assert ask(cache).prefix_len == 3


def test_a_clipped_hit_is_whole_pages():
    assert ask(make_cache(Provider(propose()), page_size=4), QUERY[:8]).prefix_len == 4


def test_a_substituted_request_is_never_stored_even_if_the_provider_allows_it():
    cache = make_cache(provider := Provider(propose(skip_insert=False)))
    req = make_request()
    match = ask(cache)
    req.adopt(match, cache.inc_lock_ref(match.handle))
    req.grow(np.array([200]))
    assert cache.cache_unfinished_req(req).num_tokens == 0
    assert cache.cache_finished_req(req).freed.tolist() == [200]
    assert cache.match_prefix(RadixKey(QUERY)).prefix_len == 0
    assert not provider.cached
    assert cache.protected_size == 0
    cache.check()


def test_references_keep_the_donor_from_eviction_while_locked():
    cache = make_cache(Provider(propose()))
    match = ask(cache)
    lock = cache.inc_lock_ref(match.handle)
    assert cache.evict(100).num_tokens == 0
    cache.dec_lock_ref(lock)
    assert cache.evict(100).num_tokens == 8


def test_copies_belong_to_the_request_and_donors_survive_room_being_made():
    pool = CheckedSlots(16)
    cache = RadixCache()
    cache.insert(RadixKey(DONOR), pool.alloc(8))
    copied = []

    def copy_slots(source):
        pool.free(cache.evict(100).freed)  # the donor is locked
        copied.append(source.tolist())
        return pool.alloc(len(source))

    cache.set_semantic_provider(Provider(propose()), copy_slots=copy_slots)
    match = ask(cache)
    assert match.protected_len == 0
    assert copied == [list(range(8))]
    assert match.kv_indices.tolist() == list(range(8, 16))
    assert cache.protected_size == 0
    req = make_request()
    req.adopt(match, cache.inc_lock_ref(match.handle))
    pool.free(cache.cache_finished_req(req).freed)
    assert pool.available + cache.total_size == pool.size
    pool.free(cache.evict(100).freed)
    assert pool.available == pool.size


def test_no_room_for_copies_is_a_miss():
    cache = make_cache(Provider(propose()), copy_slots=lambda slots: None)
    assert ask(cache).prefix_len == 0
    assert (cache.semantic.guard.counters.misses, cache.semantic.guard.counters.hits) == (1, 0)
    assert cache.protected_size == 0


def test_copies_must_be_as_many_as_asked_for():
    cache = make_cache(Provider(propose()), copy_slots=lambda slots: slots[:1])
    with pytest.raises(ConfigError, match="one per slot or None"):
        ask(cache)
    assert cache.protected_size == 0


def test_a_donor_that_was_evicted_meanwhile_is_a_miss():
    cache = make_cache(Provider(propose()))
    cache.evict(100)
    assert ask(cache).prefix_len == 0


def test_behind_a_deadline_an_error_is_a_counted_miss(caplog):
    cache = make_cache(Provider(fail), deadline_s=PATIENCE_S)
    assert ask(cache).prefix_len == 0
    assert cache.semantic.guard.counters.errors == 1
    assert "semantic provider failed" in caplog.text
    cache.set_semantic_provider(None)


def test_behind_a_deadline_nonsense_is_a_counted_miss():
    cache = make_cache(Provider(SemanticPrefixResult(["x"], 1)), deadline_s=PATIENCE_S)
    assert ask(cache).prefix_len == 0
    assert cache.semantic.guard.counters.errors == 1
    cache.set_semantic_provider(None)


def test_a_stalled_provider_costs_one_deadline_and_then_nothing(caplog):
    release, ended = threading.Event(), threading.Event()

    def stall():
        release.wait(PATIENCE_S)
        ended.set()

    provider = Provider(stall)
    cache = make_cache(provider, deadline_s=0.02)
    for _ in range(50):
        assert ask(cache).prefix_len == 0
    assert cache.semantic.guard.counters.timeouts == 50
    release.set()
    assert ended.wait(PATIENCE_S)
    assert len(provider.misses) == 1  # the others were not begun, so nobody waited for them
    cache.set_semantic_provider(None)


def test_deadline_must_be_positive():
    with pytest.raises(ConfigError, match="deadline_s"):
        RadixCache().set_semantic_provider(Provider(), deadline_s=0)


@pytest.mark.parametrize("copies", [False, True])
def test_slots_are_conserved_under_random_interleaving(copies):
    """(h): after every operation each slot is free, stored, or in the row of one request."""
    rng = np.random.default_rng(4)
    pool, cache, running = CheckedSlots(120), RadixCache(), []
    stored: list[list[int]] = []
    provider = Provider(lambda: propose(stored[int(rng.integers(len(stored)))]) if stored else None)
    cache.set_semantic_provider(provider, copy_slots=(lambda slots: pool.alloc(len(slots))) if copies else None)
    for step in range(1500):
        if rng.integers(2) and len(running) < 4:
            token_ids = [int(rng.integers(100)), *rng.integers(0, 4, int(rng.integers(1, 12))).tolist()]
            req = make_request(str(step), token_ids)
            match = cache.match_prefix(MatchPrefixParams(req.key(len(token_ids)), req))
            req.adopt(match, cache.inc_lock_ref(match.handle))
            if (fresh := pool.alloc(len(token_ids) - req.committed_len)) is None:
                pool.free(cache.cache_finished_req(req, is_insert=False).freed)
                pool.free(cache.evict(40).freed)
            else:
                req.grow(fresh)
                running.append((req, match.substituted))
        elif running:
            req, substituted = running.pop(int(rng.integers(len(running))))
            before = cache.total_size
            if rng.integers(2):
                pool.free(cache.cache_unfinished_req(req).freed)
            pool.free(cache.cache_finished_req(req, is_insert=bool(rng.integers(3))).freed)
            assert not substituted or cache.total_size == before
            stored.append(req.token_ids.tolist())
        if step % 10 == 9:
            pool.free(cache.evict(10).freed)
        cache.check()
        held = sum(req.committed_len - req.protected_len for req, _ in running)
        assert pool.available + cache.total_size + held == pool.size
    assert cache.semantic.guard.counters.hits > 50


# what is stored in front


def test_a_stored_first_token_does_not_silence_the_provider():
    cache = make_cache(provider := Provider(propose()), copy_slots=lambda slots: slots + 50)
    result = ask(cache, [1, *QUERY[1:]])
    assert len(provider.misses) == 0  # all that could stand in matches: one token is left
    result = ask(cache, [1, 40, 41, 42, 43, 44, 45, 46, 47])
    assert (result.prefix_len, result.protected_len) == (8, 1)
    assert result.kv_indices.tolist() == [0, *range(51, 58)]
    assert [(s.start, s.length, s.fidelity) for s in result.spans] == [
        (0, 1, Fidelity.EXACT),
        (1, 7, Fidelity.SUBSTITUTED),
    ]


def test_the_exact_prefix_stays_in_front_of_a_donor_that_does_not_share_it():
    cache = make_cache(Provider(propose()), copy_slots=lambda slots: slots + 50)
    cache.insert(RadixKey([60, 61, 62]), np.arange(30, 33))
    result = ask(cache, [60, 61, 62, *QUERY[3:], 70])
    assert result.kv_indices.tolist() == [30, 31, 32, *range(53, 58)]
    assert [(s.start, s.length, s.fidelity) for s in result.spans] == [(0, 3, Fidelity.EXACT), (3, 5, Fidelity.SHIFTED)]
    req = make_request(token_ids=[60, 61, 62, *QUERY[3:], 70])
    req.adopt(result, cache.inc_lock_ref(result.handle))
    assert req.own_slots(req.protected_len).freed.tolist() == list(range(53, 58))


def test_a_reference_never_gives_up_exact_slots():
    cache = make_cache(Provider(propose()))
    cache.insert(RadixKey([60, 61, 62]), np.arange(30, 33))
    assert ask(cache, [60, 61, 62, *QUERY[3:], 70]).substituted is False
    shared = ask(cache, [1, 2, 40, 41, 42, 43, 44, 45, 46])
    assert (shared.kv_indices.tolist(), shared.protected_len) == (list(range(8)), 8)


@pytest.mark.parametrize(("gain", "asked"), [(5, True), (6, False)])
def test_it_is_asked_where_enough_is_left_to_gain(gain, asked):
    cache = make_cache(provider := Provider(propose()), min_semantic_gain=gain)
    ask(cache, [1, 2, 3, 40, 41, 42, 43, 44, 45])
    assert bool(provider.misses) is asked


def test_a_proposal_that_gains_too_little_is_a_miss():
    cache = make_cache(Provider(SemanticPrefixResult(DONOR, 4)), min_semantic_gain=5)
    assert ask(cache).prefix_len == 0
    assert cache.semantic.guard.counters.misses == 1


def test_least_gain_must_be_positive():
    with pytest.raises(ConfigError, match="min_semantic_gain"):
        RadixCache().set_semantic_provider(Provider(), min_semantic_gain=0)


def test_room_for_copies_is_not_made_of_what_the_request_stands_on():
    cache = make_cache()
    cache.insert(RadixKey([60, 61, 62]), np.arange(30, 33))
    freed = []

    def copy_slots(source):
        freed.extend(cache.evict(100).freed.tolist())
        return source + 50

    cache.set_semantic_provider(Provider(propose()), copy_slots=copy_slots)
    assert ask(cache, [60, 61, 62, *QUERY[3:], 70]).substituted
    assert freed == []
    assert cache.protected_size == 0


def test_what_a_provider_says_travels_with_the_match():
    result = ask(make_cache(Provider(propose(metadata={"similarity": 0.7}))))
    assert result.metadata == {"similarity": 0.7}
    assert ask(make_cache()).metadata == {}


def test_an_insert_that_exactness_forbids_is_refused_once(caplog):
    cache = make_cache(Provider(propose(skip_insert=False)))
    for _ in range(2):
        assert ask(cache).skip_insert
    assert [record.message for record in caplog.records if "skip_insert=False, which is refused" in record.message]
    assert len(caplog.records) == 1


def test_what_was_stored_is_told_without_waiting_and_in_order():
    release, heard = threading.Event(), []

    class Slow(Provider):
        def on_request_cached(self, rid, token_ids):
            release.wait(PATIENCE_S)
            heard.append(rid)

    cache = make_cache(Slow(propose()), deadline_s=PATIENCE_S)
    for rid in ("a", "b"):
        cache.cache_finished_req(make_request(rid, [50, 51], 2))
    assert heard == []
    release.set()
    assert ask(cache).substituted  # behind them
    assert heard == ["a", "b"]
    cache.set_semantic_provider(None)


def test_an_answer_of_another_type_is_a_counted_miss():
    cache = make_cache(Provider(("tokens", 3)), deadline_s=PATIENCE_S)
    assert ask(cache).prefix_len == 0
    assert cache.semantic.guard.counters.errors == 1
    cache.set_semantic_provider(None)


def test_a_stuck_provider_keeps_no_process_from_ending():
    program = """
import threading
from kvgraft.substitution import GuardedProvider, SemanticPrefixProvider

class Stuck(SemanticPrefixProvider):
    def on_prefix_miss(self, rid, token_ids):
        threading.Event().wait()
    def on_request_cached(self, rid, token_ids):
        pass

import numpy as np
guard = GuardedProvider(Stuck(), 0.05)
assert guard.propose("r", np.arange(3)) is None
guard.shut_down()
guard.cached("r", np.arange(3))
assert guard.counters.timeouts == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S)


def test_a_call_under_way_ends_before_the_provider_is_shut_down():
    told, may_end = [], threading.Event()

    class Slow(SemanticPrefixProvider):
        def on_prefix_miss(self, rid, token_ids):
            return None

        def on_request_cached(self, rid, token_ids):
            told.append("begun")
            may_end.wait(PATIENCE_S)
            told.append("heard")

        def on_shutdown(self):
            told.append("shutdown")

    guard = GuardedProvider(Slow(), PATIENCE_S)
    guard.cached("r", np.arange(3))
    while not told:
        time.sleep(0.001)
    threading.Timer(0.05, may_end.set).start()
    guard.shut_down()
    assert told == ["begun", "heard", "shutdown"]


def test_behind_the_end_calls_are_counted_errors():
    guard = GuardedProvider(Provider(propose()), PATIENCE_S)
    guard.shut_down()
    for _ in range(100):
        guard.cached("r", np.arange(3))
    assert guard.propose("r", np.arange(3)) is None
    assert guard.counters.errors == 101


def test_a_provider_that_cannot_follow_misses_news_and_keeps_no_backlog():
    release = threading.Event()

    class Stuck(Provider):
        def on_request_cached(self, rid, token_ids):
            release.wait(PATIENCE_S)

    cache = make_cache(Stuck(), deadline_s=PATIENCE_S)
    for _ in range(100):
        cache.cache_finished_req(make_request("a", [50, 51], 2))
    assert cache.semantic.guard.counters.timeouts == 100 - 64
    release.set()
    cache.set_semantic_provider(None)
