"""The smallest whole store, and one that fails as stores do: for tests of what uses stores."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.errors import CapacityError, StoreError, StoreMissError
from kvgraft.memory.store.base import KVStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class MemoryStore(KVStore):
    """Objects of this process, in the order of their last use. What CONTRIBUTING's recipe leads to.

    Attributes:
        objects: Head and body by space and key; tests damage them.
    """

    name = "memory"

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        """Make an empty one that keeps at most so many bytes."""
        self._max_bytes = max_bytes
        self.objects: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        self._lock = threading.Lock()
        self.num_evicted = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of heads and bodies."""
        return sum(len(head) + len(body) for head, body in self.objects.values())

    def put(self, space: str, key: str, head: bytes, body: memoryview) -> bool:
        """See `KVStore`."""
        name = _named(space, key)
        num_bytes = len(head) + len(body)
        if num_bytes > self._max_bytes:
            raise CapacityError(f"{num_bytes} bytes do not fit into {self._max_bytes}")
        with self._lock:
            if name in self.objects:
                return False
            while self.used_bytes + num_bytes > self._max_bytes:
                del self.objects[next(iter(self.objects))]
                self.num_evicted += 1
            self.objects[name] = head, bytes(body)
        return True

    def keys(self, space: str) -> frozenset[str]:
        """See `KVStore`."""
        with self._lock:
            return frozenset(key for other, key in self.objects if other == space)

    def heads(self, space: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `KVStore`."""
        for key in keys:
            found = self.objects.get(_named(space, key))
            yield key, None if found is None else found[0]

    def read(self, space: str, key: str, offset: int, into: memoryview) -> None:
        """See `KVStore`."""
        _, body = self.objects.get(_named(space, key), (b"", None))
        if body is None or offset + len(into) > len(body):
            raise StoreMissError(f"there is no {key}, or it has fewer bytes")
        into[:] = body[offset : offset + len(into)]

    def remove(self, space: str, key: str) -> None:
        """See `KVStore`."""
        with self._lock:
            self.objects.pop(_named(space, key), None)

    def touch(self, space: str, keys: Iterable[str]) -> None:
        """See `KVStore`."""
        with self._lock:
            for name in [_named(space, key) for key in keys]:
                if name in self.objects:
                    self.objects[name] = self.objects.pop(name)

    def close(self) -> None:
        """See `KVStore`."""


@dataclass
class Faults:
    """Failures of a `FaultyStore`: names of its methods, changed at any time by a test.

    Attributes:
        fail: Raise `StoreError`.
        hang: Wait until `released` is set, at most `hang_s`, and then go on.
        corrupt: Give one bit other than it is (`heads`, `read`).
        truncate: Have less than was put: half a head, a body that ends too early (`heads`, `read`).
        lose: Have nothing: `keys`, `heads`, `read`; `put` says that it kept what it did not.
        full: Raise `CapacityError` (`put`).
        chance: How likely each of these happens in a call.
        seed: Of that.
        hang_s: Longest wait.
        released: Ends all waits.
        happened: How often what happened, by (fault, method).
    """

    fail: set[str] = field(default_factory=set)
    hang: set[str] = field(default_factory=set)
    corrupt: set[str] = field(default_factory=set)
    truncate: set[str] = field(default_factory=set)
    lose: set[str] = field(default_factory=set)
    full: set[str] = field(default_factory=set)
    chance: float = 1.0
    seed: int = 0
    hang_s: float = 60.0
    released: threading.Event = field(default_factory=threading.Event)
    happened: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    def strikes(self, fault: str, method: str) -> bool:
        """Draw whether it happens now, and count it."""
        with self._lock:
            if method not in getattr(self, fault) or self._random.random() >= self.chance:
                return False
            self.happened[fault, method] += 1
            return True

    def flip(self, data: memoryview | bytearray) -> None:
        """Change one bit."""
        if len(data):
            with self._lock:
                data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)


class FaultyStore(KVStore):
    """Another store, with faults. Its name is the other's."""

    def __init__(self, store: KVStore, faults: Faults | None = None) -> None:
        """Wrap `store`."""
        self.name = store.name
        self.store = store
        self.faults = faults or Faults()

    def put(self, space: str, key: str, head: bytes, body: memoryview) -> bool:
        """See `KVStore`."""
        self._begin("put")
        if self.faults.strikes("full", "put"):
            raise CapacityError("full, as a test wishes")
        if self.faults.strikes("lose", "put"):
            return True
        return self.store.put(space, key, head, body)

    def keys(self, space: str) -> frozenset[str]:
        """See `KVStore`."""
        self._begin("keys")
        return frozenset() if self.faults.strikes("lose", "keys") else self.store.keys(space)

    def heads(self, space: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """See `KVStore`."""
        self._begin("heads")
        for key, head in self.store.heads(space, keys):
            if head is None or self.faults.strikes("lose", "heads"):
                yield key, None
                continue
            changed = bytearray(head)
            if self.faults.strikes("truncate", "heads"):
                del changed[len(changed) // 2 :]
            if self.faults.strikes("corrupt", "heads"):
                self.faults.flip(changed)
            yield key, bytes(changed)

    def read(self, space: str, key: str, offset: int, into: memoryview) -> None:
        """See `KVStore`."""
        self._begin("read")
        if self.faults.strikes("lose", "read") or self.faults.strikes("truncate", "read"):
            raise StoreMissError(f"there is no {key}, or it has fewer bytes, as a test wishes")
        self.store.read(space, key, offset, into)
        if self.faults.strikes("corrupt", "read"):
            self.faults.flip(into)

    def remove(self, space: str, key: str) -> None:
        """See `KVStore`."""
        self._begin("remove")
        self.store.remove(space, key)

    def touch(self, space: str, keys: Iterable[str]) -> None:
        """See `KVStore`."""
        self._begin("touch")
        self.store.touch(space, keys)

    def close(self) -> None:
        """See `KVStore`; ends all waits."""
        self.faults.released.set()
        self.store.close()

    def _begin(self, method: str) -> None:
        if self.faults.strikes("hang", method):
            self.faults.released.wait(self.faults.hang_s)
        if self.faults.strikes("fail", method):
            raise StoreError(f"{method} fails, as a test wishes")


def _named(space: str, key: str) -> tuple[str, str]:
    for name in (space, key):
        if not name or name.strip("0123456789abcdef"):
            raise StoreError(f"{name!r} names nothing in a store; names are lower-case hexadecimal")
    return space, key
