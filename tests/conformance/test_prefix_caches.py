"""Every prefix cache against the suite that third parties run too."""

from __future__ import annotations

from kvgraft.prefix import (
    ChunkCache,
    HierarchicalRadixCache,
    HierarchicalStateCache,
    RadixCache,
    StateRadixCache,
    StreamingSession,
    SWAChunkCache,
    SWARadixCache,
)
from kvgraft.testing.prefix_suite import PrefixCacheTests
from kvgraft.testing.slots import CheckedSlots


class Host:
    def __init__(self, size=200):
        self.slots = CheckedSlots(size)

    def backup(self, kv_indices):
        return self.slots.alloc(len(kv_indices))

    def load(self, host_indices):
        return None

    def free_host(self, host_indices):
        self.slots.free(host_indices)


class TestRadixCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return RadixCache(page_size)


class TestDisabledRadixCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return RadixCache(page_size, disabled=True)


class TestSWARadixCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return SWARadixCache(page_size, sliding_window_size=7)


class TestStateRadixCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return StateRadixCache(page_size)


class TestDisabledStateRadixCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return StateRadixCache(page_size, disabled=True)


class TestHierarchicalRadixCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return HierarchicalRadixCache(page_size, transfer=Host())


class TestHierarchicalStateCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return HierarchicalStateCache(page_size, transfer=Host(), state_transfer=Host())


class TestSmallHostOfStates(PrefixCacheTests):
    def make_cache(self, page_size):
        return HierarchicalStateCache(
            page_size, transfer=Host(), state_transfer=Host(2), write_policy="write_back", policy="lfu"
        )


class TestStreamingSession(PrefixCacheTests):
    def make_cache(self, page_size):
        return StreamingSession(RadixCache(page_size))


class TestChunkCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return ChunkCache(page_size)


class TestSWAChunkCache(PrefixCacheTests):
    def make_cache(self, page_size):
        return SWAChunkCache(page_size, sliding_window_size=7)
