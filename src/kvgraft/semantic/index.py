"""Index of the stored vectors nearest to another, per namespace, with a bound over all of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.semantic.vectors import EXACT_UP_TO, ExactVectors, VectorSet, approximate_vectors

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.semantic.base import Vectors


class Neighbour(NamedTuple):
    """A stored text that resembles another."""

    key: Hashable
    similarity: float
    """Cosine of the vectors."""


class CosineIndex:
    """Finds the nearest of a namespace's vectors. Not thread-safe.

    Up to `exact_up_to` vectors of a namespace are compared one by one. More are kept in a graph by usearch, if that is
    installed, which finds nearly all; where it is not, they go on being compared one by one.

    Namespaces never meet: each has vectors of its own. They share one capacity; when it is reached, the entry that was
    added or found least recently leaves, whosever it is.

    Invariants (verified by `check`):
        - At most `capacity` entries.
        - A namespace has vectors if and only if it has entries, and one for each of them.

    Complexity: `search` O(n d), or about O(d log n) in a graph; `add` and `remove` O(d), in a graph O(d log n).
    """

    def __init__(self, dimensions: int, capacity: int = 100_000, *, exact_up_to: int = EXACT_UP_TO) -> None:
        """Build an empty index.

        Args:
            dimensions: Of the vectors.
            capacity: Most entries of all namespaces together.
            exact_up_to: Entries of a namespace that are compared one by one.

        Raises:
            ConfigError: An argument is below 1.
        """
        for name, value in (("dimensions", dimensions), ("capacity", capacity), ("exact_up_to", exact_up_to)):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        self._dimensions = dimensions
        self._capacity = capacity
        self._exact_up_to = exact_up_to
        self._recency: OrderedDict[tuple[Hashable, Hashable], None] = OrderedDict()
        self._vectors: dict[Hashable, VectorSet] = {}

    @property
    def capacity(self) -> int:
        """Most entries of all namespaces together."""
        return self._capacity

    def __len__(self) -> int:
        return len(self._recency)

    def __contains__(self, entry: tuple[Hashable, Hashable]) -> bool:
        """Return whether `(namespace, key)` is stored."""
        return entry in self._recency

    def add(self, namespace: Hashable, key: Hashable, vector: Vectors) -> list[tuple[Hashable, Hashable]]:
        """Store a vector, in place of one under the same key.

        Args:
            namespace: Of the vector.
            key: Its name there.
            vector: float32 `(dimensions,)` of length 1.

        Returns:
            Entries `(namespace, key)` that had to leave.
        """
        assert vector.shape == (self._dimensions,)
        self.remove(namespace, key)
        vectors = self._vectors.setdefault(namespace, ExactVectors(self._dimensions))
        if isinstance(vectors, ExactVectors) and len(vectors) >= self._exact_up_to:
            vectors = self._vectors[namespace] = approximate_vectors(vectors)
        vectors.add(key, vector)
        self._recency[namespace, key] = None
        evicted = []
        while len(self._recency) > self._capacity:
            oldest = next(iter(self._recency))
            self.remove(*oldest)
            evicted.append(oldest)
        return evicted

    def remove(self, namespace: Hashable, key: Hashable) -> bool:
        """Forget an entry; False if there is none."""
        if (namespace, key) not in self._recency:
            return False
        del self._recency[namespace, key]
        vectors = self._vectors[namespace]
        vectors.remove(key)
        if not len(vectors):
            del self._vectors[namespace]
        return True

    def search(self, namespace: Hashable, vector: Vectors, k: int, min_similarity: float) -> list[Neighbour]:
        """Find the nearest entries of a namespace; they become the most recent.

        Args:
            namespace: Where to look.
            vector: float32 `(dimensions,)` of length 1.
            k: Most entries to return.
            min_similarity: Least cosine.

        Returns:
            Nearest first.
        """
        vectors = self._vectors.get(namespace)
        if vectors is None or k < 1:
            return []
        found = [Neighbour(*each) for each in vectors.nearest(vector, k) if each[1] >= min_similarity]
        for neighbour in reversed(found):
            self._recency.move_to_end((namespace, neighbour.key))
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._recency.clear()
        self._vectors.clear()

    def check(self) -> None:
        """Verify the invariants; raises `CorruptCacheError`."""
        if len(self._recency) > self._capacity:
            raise CorruptCacheError(f"{len(self._recency)} vectors are stored, {self._capacity} may be")
        stored = {(namespace, key) for namespace, vectors in self._vectors.items() for key in vectors}
        if stored != set(self._recency) or sum(map(len, self._vectors.values())) != len(stored):
            raise CorruptCacheError("vectors and entries are not the same")
        if not all(map(len, self._vectors.values())):
            raise CorruptCacheError("a namespace without entries is kept")
