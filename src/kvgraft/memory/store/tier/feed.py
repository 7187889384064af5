"""Donors in a store: those of an earlier process, and of others that share it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from typing import TYPE_CHECKING

from kvgraft.errors import StoreError, one_line
from kvgraft.memory.store.record import StoreNews, decode_head

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from kvgraft.memory.store.base import KVStore
    from kvgraft.memory.store.record import DonorRecord

logger = logging.getLogger(__name__)

_BATCH = 64
"""Heads that are asked for at once."""
_MOST_FAILURES = 3
"""Heads in a row that cannot be read before the store itself counts as failed."""


class StoreFeed:
    """Looks into a store again and again, on a thread of its own. `news` is called by one thread, the engine's.

    Donors that every space has are reported: with tensor parallelism each rank has a space of its own.
    """

    def __init__(
        self, store: KVStore, spaces: Sequence[str], *, interval_s: float = 2.0, max_pending: int = 1024
    ) -> None:
        """Begin to look at once.

        Args:
            store: Where.
            spaces: Of all ranks.
            interval_s: Between two looks.
            max_pending: Donors that may wait for `news`, so that a large store does not fill the memory.
        """
        self.num_corrupt = 0
        self.num_errors = 0
        self._store = store
        self._spaces = tuple(spaces)
        self._interval_s = interval_s
        self._told: set[str] = set()
        self._added: dict[str, DonorRecord] = {}
        self._removed: list[str] = []
        self._aside: dict[str, None] = {}
        self._lock = threading.Lock()
        self._room = threading.Semaphore(max_pending)
        self._wakes = threading.Event()
        self._num_looks = self._wanted_looks = 0
        self._is_looking = False
        self._failure = ""
        self._looked = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"kvgraft-{store.name}-feed", daemon=True)
        self._thread.start()

    def news(self, limit: int = 64) -> StoreNews:
        """What has changed since the last call, of donors at most `limit`; never waits. Costs nothing if nothing has."""
        if not self._added and not self._removed:
            return StoreNews()
        with self._lock:
            removed, self._removed = self._removed, []
            keys = list(itertools.islice(self._added, limit))
            added = [self._added.pop(key) for key in keys]
        if added:
            self._room.release(len(added))
        return StoreNews(tuple(added), tuple(removed))

    def forget(self, keys: Collection[str]) -> None:
        """Report donors again if they are still there at the next look: their owner has dropped them for want of room."""
        with self._lock:  # what still waits for `news` is reported anyway
            self._told.difference_update(key for key in keys if key not in self._added)

    def look(self, timeout_s: float) -> bool:
        """Have a look begun now and wait until it is complete; False if it takes longer. For tests and start-up.

        It cannot be complete while more donors wait for `news` than may.

        Raises:
            StoreError: It failed, and the store may have more than was reported.
        """
        with self._looked:
            target = self._num_looks + (2 if self._is_looking else 1)  # the one under way may have begun too early
            self._wanted_looks = max(self._wanted_looks, target)
            self._wakes.set()
            is_over = self._looked.wait_for(lambda: self._num_looks >= target, timeout_s)
            if is_over and self._failure:
                raise StoreError(f"{self._store.name} cannot be looked into: {self._failure}")
            return is_over

    def close(self) -> None:
        """End the thread after its present work."""
        self._is_closed = True
        self._room.release()
        self._wakes.set()

    def _run(self) -> None:
        while not self._is_closed:
            with self._looked:
                self._is_looking = True
            failure = ""
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - the next look may fare better
                failure = one_line(error)
                self.num_errors += 1
                if self.num_errors == 1:
                    logger.warning("%s cannot be looked into; it is tried again: %s", self._store.name, failure)
            with self._looked:
                self._is_looking, self._failure = False, failure
                self._num_looks += 1
                self._looked.notify_all()
                is_wanted = self._num_looks < self._wanted_looks
                self._wakes.clear()
            if not is_wanted and not self._is_closed:
                self._wakes.wait(self._interval_s)

    def _look(self) -> None:
        present = frozenset.intersection(*(self._store.keys(space) for space in self._spaces))
        self._miss(self._told - present)
        self._aside = {key: None for key in self._aside if key in present}
        new = sorted(present.difference(self._told, self._aside))
        for record in itertools.chain(self._records(new), self._recovered()):
            self._room.acquire()
            if self._is_closed:
                return
            with self._lock:
                self._told.add(record.key)
                self._added[record.key] = record

    def _miss(self, gone: set[str]) -> None:
        """Report that objects are gone; those not reported yet never are."""
        with self._lock:
            self._told -= gone
            unheard = [key for key in gone if self._added.pop(key, None) is not None]
            self._removed.extend(gone.difference(unheard))
        if unheard:
            self._room.release(len(unheard))

    def _records(self, keys: Sequence[str]) -> Iterator[DonorRecord]:
        """Read heads; one that cannot be read is put aside, so that it hides no other."""
        for start in range(0, len(keys), _BATCH):
            for key, raw in self._heads(keys[start : start + _BATCH]):
                record = self._decoded(key, raw)
                if record is not None:
                    yield record

    def _heads(self, keys: Sequence[str]) -> Iterator[tuple[str, bytes | None]]:
        """Ask for heads at once, and one by one for those that did not come: what one object raises is about that one."""
        left, num_failures = dict.fromkeys(keys), 0
        with contextlib.suppress(Exception):
            for key, raw in self._store.heads(self._spaces[0], keys):
                left.pop(key, None)
                yield key, raw
        for key in left:
            try:
                found = list(self._store.heads(self._spaces[0], [key]))
            except Exception as error:  # one that a store stumbles over hides no other
                self._put_aside(key, error)
                num_failures += 1
                if num_failures == _MOST_FAILURES:
                    raise
                continue
            num_failures = 0
            yield from found

    def _recovered(self) -> Iterator[DonorRecord]:
        """Ask again for what was put aside, until one fails again: that one is asked for last at the next look."""
        for key in list(self._aside):
            del self._aside[key]
            try:
                ((_, raw),) = self._store.heads(self._spaces[0], [key])
                record = None if raw is None else decode_head(raw, self._spaces[0], key).record
            except Exception:  # noqa: BLE001 - as above
                self._aside[key] = None
                return
            if record is not None:
                yield record

    def _decoded(self, key: str, raw: bytes | None) -> DonorRecord | None:
        """Decode a head; a damaged one goes, with its body, or is put aside if it cannot go."""
        if raw is None:
            return None
        try:
            return decode_head(raw, self._spaces[0], key).record
        except StoreError as error:
            self.num_corrupt += 1
            logger.warning("%s: %s; it is removed", self._store.name, error)
        try:
            self._store.remove(self._spaces[0], key)
        except Exception as error:  # noqa: BLE001 - as above
            self._put_aside(key, error)
        return None

    def _put_aside(self, key: str, error: Exception) -> None:
        self.num_errors += 1
        self._aside[key] = None
        logger.warning("%s: %s is left out until it can be read: %s", self._store.name, key, one_line(error))
