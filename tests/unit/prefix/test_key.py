"""Keys: limits, bigram views, namespaces, comparison in pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import ConfigError
from kvgraft.prefix import RadixCache, RadixKey, frozen_tokens


def test_limit_truncates_without_a_copy():
    token_ids = np.arange(10)
    key = RadixKey(token_ids, limit=4)
    assert len(key) == 4
    assert np.shares_memory(key.token_ids, token_ids)
    cache = RadixCache()
    cache.insert(RadixKey(token_ids), token_ids)
    assert cache.match_prefix(key).prefix_len == 4


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_a_bigram_view_is_one_shorter(num_tokens, expected):
    assert len(RadixKey(np.arange(num_tokens), is_bigram=True)) == expected


@pytest.mark.parametrize(("num_tokens", "is_bigram", "expected"), [(10, False, 8), (10, True, 8), (1, True, 0)])
def test_aligned_len_counts_elements_of_whole_pages(num_tokens, is_bigram, expected):
    assert RadixKey(np.arange(num_tokens), is_bigram=is_bigram).aligned_len(4) == expected


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("is_bigram", [False, True])
def test_match_counts_whole_pages(page_size, is_bigram):
    left = RadixKey(np.arange(5000), is_bigram=is_bigram)
    right = RadixKey(np.append(np.arange(3001), 7), is_bigram=is_bigram)
    shared = 3001 - is_bigram
    assert left.match(right, page_size) == shared // page_size * page_size


@pytest.mark.parametrize(
    "other",
    [RadixKey(np.array([1]), "x"), RadixKey(np.array([1]), None, "s"), RadixKey(np.array([1, 2]), is_bigram=True)],
)
def test_keys_of_different_namespaces_are_not_compared(other):
    with pytest.raises(ConfigError, match="cannot be compared"):
        RadixKey([1]).match(other)


def test_salt_and_extra_key_are_separate_parts_of_the_namespace():
    cache = RadixCache()
    cache.insert(RadixKey([1, 2], "a", None), np.arange(2))
    assert cache.match_prefix(RadixKey([1, 2], None, "a")).prefix_len == 0
    assert cache.match_prefix(RadixKey([1, 2], "a")).prefix_len == 2


def test_negative_limit_is_refused():
    with pytest.raises(ConfigError, match="limit"):
        RadixKey([1], limit=-1)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64])
def test_bigram_splits_share_a_token_and_match_on(page_size):
    cache = RadixCache(page_size)
    token_ids = np.arange(400)
    length = 399 // page_size * page_size
    cache.insert(RadixKey(token_ids, is_bigram=True), np.arange(399))
    for cut in (200, 100, 300):
        changed = token_ids.copy()
        changed[cut] = -5
        assert cache.match_prefix(RadixKey(changed, is_bigram=True)).prefix_len == (cut - 1) // page_size * page_size
        cache.check()
    result = cache.match_prefix(RadixKey(token_ids, is_bigram=True))
    assert result.kv_indices.tolist() == list(range(length))


def stored_bytes(cache):
    """Token bytes of all nodes."""
    return [node.tokens for node in cache.root_handle.subtree()][1:]


def test_frozen_tokens_are_shared_where_all_of_them_are_stored():
    token_ids = frozen_tokens(list(range(8)))
    cache = RadixCache()
    cache.insert(RadixKey(token_ids, limit=8), np.arange(8))
    assert stored_bytes(cache)[0] is token_ids.base
    with pytest.raises(ValueError, match="WRITEABLE"):
        token_ids.flags.writeable = True


@pytest.mark.parametrize(
    ("page_size", "bounds"), [(1, (0, 7)), (1, (1, 8)), (4, (0, 7)), (4, (0, 6))], ids=["head", "tail", "page", "pages"]
)
def test_a_part_of_frozen_tokens_is_copied(page_size, bounds):
    token_ids = frozen_tokens(range(8))
    part = token_ids[slice(*bounds)]
    cache = RadixCache(page_size)
    cache.insert(RadixKey(part), np.arange(len(part)))
    assert stored_bytes(cache) == [part[: len(part) // page_size * page_size].tobytes()]


@pytest.mark.parametrize("make_readonly", [False, True])
def test_tokens_that_somebody_could_write_to_are_copied(make_readonly):
    """An array's owner can take a read-only flag back, and a bytearray has none."""
    own = np.arange(8)
    views = [own[:], np.frombuffer(bytearray(own.tobytes()), dtype=np.int64)]
    for view in views:
        view.flags.writeable = not make_readonly
        cache = RadixCache()
        cache.insert(RadixKey(view), np.arange(8))
        assert stored_bytes(cache) == [np.arange(8).tobytes()]
        assert not np.shares_memory(np.frombuffer(stored_bytes(cache)[0], dtype=np.int64), view)


def test_frozen_tokens_survive_a_change_of_what_they_were_made_from():
    own = np.arange(8)
    token_ids = frozen_tokens(own)
    own[0] = 99
    assert token_ids.tolist() == list(range(8))
