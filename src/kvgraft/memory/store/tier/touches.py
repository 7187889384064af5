"""Report uses of objects to a store, so that it evicts others: on a thread, for a store may take its time."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from kvgraft.errors import StoreError
from kvgraft.memory.store.tier.tasks import TaskThreads

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.memory.store.base import KVStore


class Touches:
    """Of one store. While it takes its time uses gather, each object once."""

    def __init__(self, store: KVStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: set[tuple[str, str]] = set()
        self._threads = TaskThreads(f"kvgraft-{store.name}-touch")

    def report(self, spaces: Sequence[str], keys: Iterable[str]) -> None:
        """Report uses of objects in all of some spaces; never waits."""
        used = {(space, key) for key in keys for space in spaces}
        with self._lock:
            is_awaited = bool(self._waiting)
            self._waiting |= used
        if used and not is_awaited and not self._threads.submit(self._touch):
            with self._lock:
                self._waiting.clear()

    def close(self) -> None:
        """End; uses that were not reported yet are dropped."""
        self._threads.close()

    def _touch(self) -> None:
        with self._lock:
            used, self._waiting = self._waiting, set()
        for space in {space for space, _ in used}:
            with contextlib.suppress(StoreError):  # they may leave a little sooner
                self._store.touch(space, [key for other, key in used if other == space])
