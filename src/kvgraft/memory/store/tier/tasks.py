"""Threads that carry out tasks and keep no process from ending, however long a store takes."""

from __future__ import annotations

import contextlib
import logging
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class TaskThreads:
    """Daemon threads over one queue, started with the first task. Thread-safe."""

    def __init__(self, name: str, num_threads: int = 1) -> None:
        self._name = name
        self._num_threads = num_threads
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    def submit(self, task: Callable[[], None]) -> bool:
        """Queue a task, which must not raise.

        Returns:
            False after `close`, and where the machine has no thread for it; the task is dropped.
        """
        with self._lock:
            if self._is_closed:
                return False
            self._start_threads()
            if not self._threads:
                return False
            self._tasks.put(task)
        return True

    def _start_threads(self) -> None:
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the next task tries again
                logger.warning(
                    "%s has %d threads, not %d: %s", self._name, len(self._threads), self._num_threads, error
                )
                return
            self._threads.append(thread)

    def close(self, timeout_s: float = 0.0) -> bool:
        """End the threads after their present tasks, dropping what waits; False if one takes longer than `timeout_s`."""
        with self._lock:
            self._is_closed = True
            threads, self._threads = self._threads, []
            with contextlib.suppress(Empty):  # threads take tasks meanwhile
                while True:
                    self._tasks.get_nowait()
            for _ in threads:
                self._tasks.put(None)
        for thread in threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in threads)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("a task of %s failed", self._name)
            del task  # it may hold K/V
