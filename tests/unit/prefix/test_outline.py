"""What programs are told of a prefix tree: its shape, without its tokens."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.prefix import MatchPrefixParams, RadixCache, RadixKey, StreamingSession


def key(*token_ids):
    return RadixKey(np.array(token_ids))


@pytest.fixture
def cache():
    cache = RadixCache.create_simulated()
    for first, tokens in ((0, (1, 2, 3, 4)), (10, (1, 2, 7)), (20, (9,))):
        cache.insert(key(*tokens), np.arange(first, first + len(tokens)))
    return cache


def test_nodes_come_behind_their_parents_and_hold_all_tokens(cache):
    nodes = cache.outline(99)
    assert all(node.parent < index for index, node in enumerate(nodes))
    assert sum(node.num_tokens for node in nodes) == 6
    assert sorted(node.num_tokens for node in nodes if node.parent == -1) == [1, 2]
    assert sorted(node.num_tokens for node in nodes if node.parent != -1) == [1, 2]


def test_locks_are_told(cache):
    cache.inc_lock_ref(cache.match_prefix(MatchPrefixParams(key(1, 2, 7))).handle)
    assert sum(node.is_protected for node in cache.outline(99)) == 2


@pytest.mark.parametrize("limit", range(6))
def test_no_more_than_asked_for(cache, limit):
    assert cache.outline(limit) == cache.outline(99)[:limit]


def test_sessions_tell_of_the_cache_that_they_wrap(cache):
    assert StreamingSession(cache).outline(9) == cache.outline(9)
