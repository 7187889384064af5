"""The index by examples; `tests/property/test_cosine_index.py` compares it with a dict."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.semantic import CosineIndex, unit_rows, vectors


def unit(*values):
    return unit_rows(np.array([values], np.float32))[0]


def random_rows(count, dimensions=32, seed=0):
    return unit_rows(np.random.default_rng(seed).normal(size=(count, dimensions)).astype(np.float32))


def keys(found):
    return [neighbour.key for neighbour in found]


def test_nearest_first_and_none_below_the_least_similarity():
    index = CosineIndex(2)
    for key, vector in {"right": unit(1, 0), "diagonal": unit(1, 1), "up": unit(0, 1), "left": unit(-1, 0)}.items():
        index.add("n", key, vector)
    found = index.search("n", unit(1, 0), 3, 0.5)
    assert keys(found) == ["right", "diagonal"]
    assert [each.similarity for each in found] == pytest.approx([1, 2**-0.5])
    assert keys(index.search("n", unit(1, 0), 1, -1)) == ["right"]
    assert keys(index.search("n", unit(1, 0), 9, -1)) == ["right", "diagonal", "up", "left"]
    assert index.search("n", unit(1, 0), 0, -1) == []


def test_namespaces_never_meet():
    index = CosineIndex(2)
    index.add("a", "k", unit(1, 0))
    index.add("b", "k", unit(0, 1))
    assert index.search("a", unit(0, 1), 5, 0.5) == []
    assert index.search("c", unit(0, 1), 5, -1) == []
    assert index.remove("a", "k")
    assert keys(index.search("b", unit(0, 1), 5, 0.5)) == ["k"]
    index.check()


def test_a_key_that_is_added_again_has_the_newer_vector():
    index = CosineIndex(2)
    index.add("n", "k", unit(1, 0))
    index.add("n", "k", unit(0, 1))
    assert len(index) == 1
    assert index.search("n", unit(1, 0), 5, 0.5) == []


def test_the_entry_found_least_recently_leaves_whosever_it_is():
    index = CosineIndex(2, capacity=3)
    index.add("a", 1, unit(1, 0))
    index.add("b", 2, unit(1, 0))
    index.add("b", 3, unit(0, 1))
    assert keys(index.search("a", unit(1, 0), 1, 0.5)) == [1]
    assert index.add("b", 4, unit(1, 1)) == [("b", 2)]
    assert ("b", 2) not in index
    assert ("a", 1) in index
    assert (len(index), index.capacity) == (3, 3)
    index.check()


def test_a_gap_is_filled_and_nothing_is_lost():
    rows = random_rows(50)
    index = CosineIndex(32)
    for key, row in enumerate(rows):
        index.add("n", key, row)
    for key in range(0, 50, 3):
        assert index.remove("n", key)
    assert not index.remove("n", 0)
    for key, row in enumerate(rows):
        assert (keys(index.search("n", row, 1, 0.99)) == [key]) == bool(key % 3)
    index.check()


@pytest.mark.parametrize("arguments", [(0,), (2, 0), (-1, 5)])
def test_sizes_are_checked(arguments):
    with pytest.raises(ConfigError, match="must be at least 1"):
        CosineIndex(*arguments)
    with pytest.raises(ConfigError, match="exact_up_to must be at least 1"):
        CosineIndex(2, exact_up_to=0)


def test_check_finds_what_is_lost():
    index = CosineIndex(2)
    index.add("n", 1, unit(1, 0))
    index._vectors["n"].remove(1)
    with pytest.raises(CorruptCacheError, match="not the same"):
        index.check()


class TestVeryMany:
    """Beyond `exact_up_to` a namespace's vectors go into a graph, where usearch is installed."""

    def fill(self, rows, exact_up_to):
        index = CosineIndex(rows.shape[1], exact_up_to=exact_up_to)
        for key, row in enumerate(rows):
            index.add("n", key, row)
        index.add("small", "k", rows[0])
        return index

    def test_a_graph_finds_nearly_what_comparing_finds(self):
        pytest.importorskip("usearch", reason="the extra kvgraft[ann] is not installed")
        rows = random_rows(400)
        graph, exact = self.fill(rows, 100), self.fill(rows, 1_000)
        assert [type(graph._vectors[name]).__name__ for name in ("n", "small")] == ["_GraphVectors", "ExactVectors"]
        queries = random_rows(50, seed=1)
        wanted = [set(keys(exact.search("n", query, 5, 0.0))) for query in queries]
        found = [set(keys(graph.search("n", query, 5, 0.0))) for query in queries]
        assert sum(len(a & b) for a, b in zip(wanted, found, strict=True)) > 0.95 * sum(map(len, wanted))
        near = graph.search("n", rows[7], 1, 0.5)[0]
        assert (near.key, near.similarity) == (7, pytest.approx(1, abs=1e-5))

    def test_what_is_removed_from_a_graph_is_not_found_again(self):
        pytest.importorskip("usearch", reason="the extra kvgraft[ann] is not installed")
        rows = random_rows(300)
        index = self.fill(rows, 50)
        for key in range(0, 300, 2):
            index.remove("n", key)
        for key, row in enumerate(rows):
            assert (keys(index.search("n", row, 1, 0.99)) == [key]) == bool(key % 2)
        index.check()
        for key in range(1, 300, 2):
            index.remove("n", key)
        assert index.search("n", rows[0], 3, -1) == []
        index.check()

    def test_without_usearch_all_are_compared_and_it_says_so_once(self, monkeypatch, caplog):
        monkeypatch.setitem(sys.modules, "usearch", None)
        monkeypatch.setitem(sys.modules, "usearch.index", None)
        vectors._graph_class.cache_clear()
        rows = random_rows(60)
        with caplog.at_level(logging.WARNING):
            index = self.fill(rows, 20)
        vectors._graph_class.cache_clear()
        assert [keys(index.search("n", row, 1, 0.99)) for row in rows] == [[key] for key in range(60)]
        assert caplog.text.count("kvgraft[ann]") == 1
