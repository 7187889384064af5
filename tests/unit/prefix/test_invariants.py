"""Whatever is damaged, `check` says so as it documents, with `CorruptCacheError`, or does not mind; it never fails itself."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix import HierarchicalRadixCache, HierarchicalStateCache, RadixCache, RadixKey, SWARadixCache


class Copies:
    """Transfers that always have room."""

    def backup(self, kv_indices):
        return kv_indices + 1000

    def load(self, host_indices):
        return host_indices + 2000

    def free_host(self, host_indices):
        pass


def filled(kind):
    """A small cache in which every sort of node occurs, and its nodes, the root first."""
    cache = {
        "plain": RadixCache,
        "hybrid": lambda: SWARadixCache(sliding_window_size=3),
        "two tiers": lambda: HierarchicalRadixCache(transfer=Copies()),
        "states in two tiers": lambda: HierarchicalStateCache(transfer=Copies(), state_transfer=Copies()),
    }[kind]()
    for first, tokens in enumerate([[1, 2, 3, 4], [1, 2, 3, 9, 9], [5, 6], [5, 7]]):
        slots = np.arange(10 * first, 10 * first + len(tokens))
        parts = {"hybrid": {"swa_indices": slots}, "states in two tiers": {"states": {len(tokens): 100 + first}}}
        cache.insert(RadixKey(tokens), slots, **parts.get(kind, {}))
    cache.inc_lock_ref(cache.match_prefix(RadixKey([5, 6])).handle)
    if kind.endswith("two tiers"):
        cache.evict(3)
    elif kind == "hybrid":
        cache.evict(0, 3)
    cache.check()
    return cache, list(cache.root_handle.subtree())


def damages(node, root):
    """Attributes of a node with values of their own kind that are wrong, or happen to be right."""
    kinds = {
        int: (0, 1, 7, 100),
        bytes: (b"", b"12345678"),
        np.ndarray: (np.empty(0, np.int64), np.arange(2), np.arange(10_000, 10_004)),
        dict: ({},),
    }
    for name in (name for cls in type(node).__mro__ for name in getattr(cls, "__slots__", ())):
        values = kinds.get(type(getattr(node, name)), ())
        if name in ("parent", "window", "tree", "component", "host_component"):
            values = (None, node, root) if name == "parent" else (None,)
        yield from ((name, value) for value in values)


@pytest.mark.parametrize("kind", ["plain", "hybrid", "two tiers", "states in two tiers"])
def test_check_never_fails_itself(kind):
    _, nodes = filled(kind)
    found = 0
    for index in range(len(nodes)):
        for nth in range(len(list(damages(nodes[index], nodes[0])))):
            cache, fresh = filled(kind)
            name, value = list(damages(fresh[index], fresh[0]))[nth]
            setattr(fresh[index], name, value)
            try:
                cache.check()
            except CorruptCacheError:
                found += 1
    assert found > 50
