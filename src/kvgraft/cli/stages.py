"""Show on stderr what a start is at: one line that changes on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvgraft.cli.parser import COLUMNS
from kvgraft.observability.stages import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator


class StageLine(logging.Handler):
    """Writes stages to stderr, as it is at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        """Replace the line of the stage before, or write one more."""
        text = f"kvgraft: {record.getMessage()}"
        try:
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{text[: COLUMNS - 1]:<{COLUMNS - 1}}")
            else:
                sys.stderr.write(text + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            self.handleError(record)

    def clear(self) -> None:
        """Leave an empty line for the next output."""
        if sys.stderr is not None and sys.stderr.isatty():
            sys.stderr.write(f"\r{'':<{COLUMNS - 1}}\r")
            sys.stderr.flush()


@contextmanager
def shown_stages(is_shown: bool = True) -> Iterator[None]:
    """Show the stages of a start within; the line is gone at the end, also after an error.

    Args:
        is_shown: False shows nothing: for output that programs read.
    """
    if not is_shown or sys.stderr is None:
        yield
        return
    handler, level = StageLine(), STAGES.level
    STAGES.addHandler(handler)
    STAGES.setLevel(logging.INFO)
    STAGES.propagate = False
    try:
        yield
    finally:
        STAGES.removeHandler(handler)
        STAGES.setLevel(level)
        STAGES.propagate = True
        handler.clear()
