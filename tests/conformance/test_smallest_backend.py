"""A back end as CONTRIBUTING describes it, with nothing but what it must have; requests come with the base class."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix import (
    EvictResult,
    InsertResult,
    MatchResult,
    PrefixCache,
    PrefixHandle,
    RadixKey,
    TreeCacheBuildContext,
    create_tree_cache,
    register_radix_cache_backend,
)
from kvgraft.testing.prefix_suite import PrefixCacheTests


class Stored(PrefixHandle):
    """A prefix by its page names, the shortest first."""

    def __init__(self, names):
        self.names = names


@dataclass
class Page:
    slots: np.ndarray
    locks: int = 0
    children: int = 0


class PageTable(PrefixCache):
    """Pages under all tokens up to their end, in the order of their last use."""

    def __init__(self, page_size):
        self._page_size, self._pages = page_size, {}

    @property
    def page_size(self):
        return self._page_size

    @property
    def evictable_size(self):
        return sum(len(page.slots) for page in self._pages.values() if not page.locks)

    @property
    def protected_size(self):
        return sum(len(page.slots) for page in self._pages.values() if page.locks)

    def names(self, key):
        ends = range(self._page_size, key.aligned_len(self._page_size) + 1, self._page_size)
        return [(key.namespace, bytes(key.slice_bytes(0, end))) for end in ends]

    def match_prefix(self, params):
        key = params if isinstance(params, RadixKey) else params.key
        names = [name for name in self.names(key) if name in self._pages]
        for name in reversed(names):
            self._pages[name] = self._pages.pop(name)
        return MatchResult([self._pages[name].slots for name in names], len(names) * self._page_size, Stored(names))

    def insert(self, key, kv_indices=None, *, after=None, priority=0, counted_len=None):
        match, names = self.match_prefix(key), self.names(key)
        for index in range(len(match.handle.names), len(names)):
            start = index * self._page_size
            self._pages[names[index]] = Page(np.array(kv_indices[start : start + self._page_size]))
            if index:
                self._pages[names[index - 1]].children += 1
        return InsertResult(match.prefix_len, len(names) * self._page_size, Stored(names))

    def evict(self, num_tokens):
        freed = []
        while len(freed) * self._page_size < num_tokens:
            name = next((name for name, page in self._pages.items() if not page.locks and not page.children), None)
            if name is None:
                break
            freed.append(self._pages.pop(name).slots)
            above = name[0], name[1][: -8 * self._page_size]
            if above in self._pages:
                self._pages[above].children -= 1
        return EvictResult(np.concatenate([np.empty(0, np.int64), *freed]))

    def resolve(self, handle):
        if not all(name in self._pages for name in handle.names):
            raise CorruptCacheError("the prefix was dropped: match again")
        return [self._pages[name] for name in handle.names]

    def inc_lock_ref(self, handle):
        for page in self.resolve(handle):
            page.locks += 1
        return handle

    def dec_lock_ref(self, handle):
        for page in self.resolve(handle):
            page.locks -= 1
        return EvictResult(np.empty(0, np.int64))

    def path_slots(self, handle, start=0):
        return np.concatenate([np.empty(0, np.int64), *(page.slots for page in self.resolve(handle))])[start:]

    def reset(self):
        slots = np.concatenate([np.empty(0, np.int64), *(page.slots for page in self._pages.values())])
        self._pages.clear()
        return slots

    def check(self):
        if any(page.locks < 0 for page in self._pages.values()):
            raise CorruptCacheError("a page has fewer locks than none")


class TestPageTable(PrefixCacheTests):
    def make_cache(self, page_size):
        return PageTable(page_size)


def test_it_is_built_by_name():
    register_radix_cache_backend("pages", lambda context: PageTable(context.page_size))
    cache = create_tree_cache(TreeCacheBuildContext(backend="pages", page_size=4, enable_streaming_session=True))
    assert isinstance(cache.inner, PageTable)


def test_what_it_must_have_is_what_it_has():
    """A back end of one pool writes lookup, insert, eviction, locks and sizes, and no lifecycle of requests."""
    own = {name for name in vars(PageTable) if not name.startswith("_")} - {"names", "resolve"}
    assert own == PrefixCache.__abstractmethods__
    with pytest.raises(TypeError, match="abstract"):
        PrefixCache()
