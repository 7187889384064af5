"""Deadlines for calls into a library that knows none: a thread carries them out, and who asked waits only so long."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from queue import Empty, LifoQueue, SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from kvgraft.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

Result = TypeVar("Result")


class Lane:
    """A thread and a buffer of its own, so that a call which comes back late writes to no other memory.

    Attributes:
        buffer: uint8, for the calls of the lane's holder.
    """

    def __init__(self, name: str, num_bytes: int) -> None:
        self.buffer: NDArray[np.uint8] = np.empty(num_bytes, np.uint8)
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, do: Callable[[], Result], timeout_s: float) -> Result:
        """Have something done; what it returns or raises.

        Raises:
            StoreError: It takes longer; it goes on, and what it gives is thrown away.
        """
        task = _Task(do)
        self._tasks.put(task.run)
        if not task.is_done.wait(timeout_s):
            raise StoreError(f"no answer within {timeout_s:g} s")
        return task.result()

    def later(self, do: Callable[[], None] | None) -> None:
        """Queue work after the calls so far; None ends the thread."""
        self._tasks.put(do)

    def _work(self) -> None:
        while (do := self._tasks.get()) is not None:
            do()
            del do  # it may hold K/V


class Lanes:
    """A few lanes that callers take in turn. Thread-safe. If calls hang in all of them, none is free."""

    def __init__(self, name: str, count: int, buffer_bytes: int) -> None:
        self.all = [Lane(f"{name}-{number}", buffer_bytes) for number in range(count)]
        self._idle: LifoQueue[Lane] = LifoQueue()
        for lane in self.all:
            self._idle.put(lane)

    @contextmanager
    def one(self, timeout_s: float) -> Iterator[Lane]:
        """Hold a lane; it is free again as soon as its last call is over, however late that is.

        Raises:
            StoreError: None is free in time.
        """
        try:
            lane = self._idle.get(timeout=timeout_s)
        except Empty:
            raise StoreError(f"no call of before has come back within {timeout_s:g} s") from None
        try:
            yield lane
        finally:
            lane.later(lambda: self._idle.put(lane))

    def close(self) -> None:
        """End the threads, each after its call."""
        for lane in self.all:
            lane.later(None)


class _Task(Generic[Result]):
    def __init__(self, do: Callable[[], Result]) -> None:
        self.is_done = threading.Event()
        self._do = do
        self._results: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._results.append(self._do())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            self._error = error
        self.is_done.set()

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._results[0]
