"""Ends of the process where unwinding is no way out."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that Ctrl+C ended."""


@contextmanager
def ending_at_interrupt() -> Iterator[None]:
    """Let SIGINT end the process at once within, with `INTERRUPTED` and one line on stderr.

    For imports, which turn `KeyboardInterrupt` into tracebacks and other errors, and for starts of which another thread
    computes a part: an interpreter that ends while a thread is in torch aborts. Does nothing outside of the main thread,
    which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(code: int) -> NoReturn:
    """End the process without the interpreter's own end, which may abort or hang while a thread is in torch."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
    os._exit(code)


def _end(_signal: int, _frame: FrameType | None) -> None:
    # Not through sys.stderr, which may be in the middle of a write. On a terminal, the line of a stage may be unfinished.
    line = b"kvgraft: interrupted\n"
    try:
        os.write(2, b"\n" + line if os.isatty(2) else line)
    finally:
        os._exit(INTERRUPTED)
