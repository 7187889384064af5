"""Tracebacks of one kind are logged once a minute: without memory, every connection fails at the same place."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERVAL_S = 60.0
"""Seconds in which one traceback of a kind is logged."""
_MOST_KINDS = 256
_LOGGERS = ("asyncio", "uvicorn.error", "kvgraft.http.access_log")
"""Loggers of what fails per connection or request, in the event loop, the server and our own middleware."""


class TracebackLimit(logging.Filter):
    """Lets the first record of a kind pass in every interval; it says how many there were since the last one.

    A kind is a logger, the class of the error and the line that raised it. Records without a traceback pass.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed_at: dict[tuple[str, str, str, int], float] = {}
        self._num_held: dict[tuple[str, str, str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is logged."""
        kind = _kind_of(record)
        if kind is None:
            return True
        now = self._clock()
        if now < self._passed_at.get(kind, -INTERVAL_S) + INTERVAL_S:
            self._num_held[kind] = self._num_held.get(kind, 0) + 1
            return False
        if len(self._passed_at) >= _MOST_KINDS:
            self._passed_at.clear()
            self._num_held.clear()
        self._passed_at[kind] = now
        num_held = self._num_held.pop(kind, 0)
        if num_held:
            record.msg = (
                f"{record.getMessage()} (and {num_held} times more, not logged, since the last line of this kind)"
            )
            record.args = None
        return True


@contextmanager
def limited_tracebacks() -> Iterator[None]:
    """Limit what fails per connection while a server runs."""
    limit = TracebackLimit()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(limit)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(limit)


def _kind_of(record: logging.LogRecord) -> tuple[str, str, str, int] | None:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = ("", 0) if trace is None else (trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    return record.name, type(error).__name__, *place
