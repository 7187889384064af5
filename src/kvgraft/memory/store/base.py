"""The interface of stores of donors: named, immutable objects that processes share. Knows bytes, not K/V."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class KVStore(ABC):
    """Keeps objects, each a `head` and a `body` of bytes, under a space and a key: both lower-case hexadecimal.

    Many processes use a store at once, and it may be far away. It may lose any object at any time, when it is full, restarted
    or cleaned up; what it gives back must be what was put or an error, and readers verify that (`RowLayout`). An
    object never changes: two that are put under the same key are alike, and the first stays.

    All methods block, for a bounded time that is the store's to choose, and may be called from several threads at once.
    Every failure is a `StoreError` of one line.

    Attributes:
        name: Short, for metrics and messages: `file`, `redis`.
    """

    name: str = "store"

    @abstractmethod
    def put(self, space: str, key: str, head: bytes, body: memoryview) -> bool:
        """Keep an object; readers see all of it or none, also if this process dies meanwhile.

        Args:
            space: What belongs together: K/V of one model state, in one layout.
            key: Name of the object in its space.
            head: What `heads` gives back.
            body: What `read` gives back, one-dimensional bytes; not kept alive.

        Returns:
            False if there is such an object already.

        Raises:
            CapacityError: It does not fit, also not by removing others.
            StoreError: It is not kept for another reason.
        """

    @abstractmethod
    def keys(self, space: str) -> frozenset[str]:
        """Names of the objects in a space, as far as the store knows.

        Raises:
            StoreError: The store cannot be asked.
        """

    @abstractmethod
    def heads(self, space: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """Yield every one of `keys` with the head of its object, or None if it is gone.

        Raises:
            StoreError: The store cannot be asked.
        """

    @abstractmethod
    def read(self, space: str, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the body's bytes from `offset` on, in one request where the medium allows it.

        Raises:
            StoreMissError: There is no such object, or it has fewer bytes.
            StoreError: It cannot be read.
        """

    @abstractmethod
    def remove(self, space: str, key: str) -> None:
        """Forget an object; one that is gone is ignored.

        Raises:
            StoreError: It cannot be removed.
        """

    @abstractmethod
    def touch(self, space: str, keys: Iterable[str]) -> None:
        """Note that objects were of use, where the store decides by that what leaves first."""

    @abstractmethod
    def close(self) -> None:
        """Give back connections and threads; nothing is called after it."""
