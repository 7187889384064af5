"""Work that is put off: what a busy thread leaves is taken up in batches by a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Item = TypeVar("Item")
logger = logging.getLogger(__name__)

_PERIOD_S = 0.25
"""The thread wakes this often rather than with every item, so that it does not compete with the one that leaves them."""
_MOST_ITEMS = 1 << 16


class Backlog(Generic[Item]):
    """A bounded queue and the thread that empties it. `put` is safe on any thread and never waits.

    Items that find the queue full are dropped, with one warning. A batch that fails is lost, and the first failure is logged.
    """

    def __init__(self, name: str, take: Callable[[list[Item]], None], *, limit: int = _MOST_ITEMS) -> None:
        """Start the thread.

        Args:
            name: Of the thread, and what warnings call the work.
            take: Called on the thread four times a second with what has come meanwhile, in order, and once more at the end.
            limit: Items that may wait.
        """
        self._name = name
        self._take = take
        self._limit = limit
        self._items: deque[Item] = deque()
        self._has_dropped = False
        self._has_failed = False
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvgraft-{name}", daemon=True)
        self._thread.start()

    def put(self, item: Item) -> None:
        """Leave an item; nothing happens to those that come after `close`."""
        if len(self._items) < self._limit:
            self._items.append(item)
        elif not self._has_dropped:
            self._has_dropped = True
            logger.warning("%s cannot keep up: %d records wait, and further ones are dropped", self._name, self._limit)

    def close(self, timeout_s: float = 5.0) -> None:
        """Have what is left taken up, and wait for it for at most `timeout_s`."""
        self._is_closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_closed.wait(_PERIOD_S)
            batch = [self._items.popleft() for _ in range(len(self._items))]
            try:
                self._take(batch)
            except Exception:
                if not self._has_failed:
                    logger.exception("%s failed; further failures of it are not logged", self._name)
                self._has_failed = True
