"""Vectors of one namespace: compared one by one, or in a graph by usearch where they are very many."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from functools import cache
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from kvgraft.semantic.base import Vectors

logger = logging.getLogger(__name__)

EXACT_UP_TO = 50_000
"""Vectors that are compared one by one: some 10 ms at 384 dimensions."""

_FIRST_ROWS = 16


class VectorSet(ABC):
    """Vectors under keys; nothing in it is there twice."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of vectors."""

    @abstractmethod
    def __iter__(self) -> Iterator[Hashable]:
        """Yield all keys."""

    @abstractmethod
    def add(self, key: Hashable, vector: Vectors) -> None:
        """Store a vector under a new key."""

    @abstractmethod
    def remove(self, key: Hashable) -> None:
        """Forget the vector under a known key."""

    @abstractmethod
    def nearest(self, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        """Return up to `k` keys and cosines, nearest first."""


class ExactVectors(VectorSet):
    """One matrix, which grows by doubling; its last row fills a gap."""

    def __init__(self, dimensions: int) -> None:
        self._matrix = np.empty((_FIRST_ROWS, dimensions), np.float32)
        self._keys: list[Hashable] = []
        self._rows: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def matrix(self) -> Vectors:
        """All vectors, in the order of iteration."""
        return self._matrix[: len(self._keys)]

    def __iter__(self) -> Iterator[Hashable]:
        """Yield all keys, in the order of `matrix`."""
        return iter(self._keys)

    def add(self, key: Hashable, vector: Vectors) -> None:
        """Append a row."""
        assert key not in self._rows
        size = len(self._keys)
        if size == len(self._matrix):
            self._matrix = np.concatenate([self._matrix, np.empty_like(self._matrix)])
        self._matrix[size] = vector
        self._rows[key] = size
        self._keys.append(key)

    def remove(self, key: Hashable) -> None:
        """Move the last row to where this one was."""
        row, last = self._rows.pop(key), self._keys.pop()
        if row < len(self._keys):
            self._matrix[row] = self._matrix[len(self._keys)]
            self._keys[row] = last
            self._rows[last] = row

    def nearest(self, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        """Compare with every row."""
        similarities = self.matrix @ vector
        best = np.arange(len(similarities))
        if k < len(similarities):
            best = np.argpartition(similarities, -k)[-k:]
        best = best[np.argsort(-similarities[best], kind="stable")]
        return [(self._keys[row], float(similarities[row])) for row in best]


class _GraphVectors(VectorSet):
    """A graph of usearch, which numbers what it holds."""

    def __init__(self, index: Any) -> None:  # noqa: ANN401 - of an optional package
        self._index = index
        self._next = count()
        self._numbers: dict[Hashable, int] = {}
        self._keys: dict[int, Hashable] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._numbers)

    def add(self, key: Hashable, vector: Vectors) -> None:
        number = next(self._next)
        self._index.add(number, vector, threads=1)
        self._numbers[key], self._keys[number] = number, key

    def remove(self, key: Hashable) -> None:
        number = self._numbers.pop(key)
        del self._keys[number]
        self._index.remove(number)

    def nearest(self, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        found = self._index.search(vector, k, threads=1)
        pairs = zip(found.keys.tolist(), found.distances.tolist(), strict=True)
        return [(self._keys[number], 1 - distance) for number, distance in pairs if number in self._keys]


def approximate_vectors(exact: ExactVectors) -> VectorSet:
    """Put vectors into a graph; without usearch they are returned as they are.

    Complexity: O(n d log n); some 20 s for 50,000.
    """
    new_graph = _graph_class()
    if new_graph is None:
        return exact
    graph = _GraphVectors(new_graph(ndim=exact.matrix.shape[1], metric="ip", dtype="f32"))
    for key, vector in zip(exact, exact.matrix, strict=True):
        graph.add(key, vector)
    return graph


@cache
def _graph_class() -> Any:  # noqa: ANN401 - of an optional package
    """Return usearch's index, or None and say so once."""
    try:
        from usearch.index import Index
    except ImportError:
        logger.warning("without usearch, vectors beyond %d are compared one by one as well: kvgraft[ann]", EXACT_UP_TO)
        return None
    return Index
