"""`python -m kvgraft`, and the command `kvgraft`."""

from __future__ import annotations

import sys

from kvgraft.interrupts import ending_at_interrupt


def start() -> None:
    """Run a command and exit with its code."""
    with ending_at_interrupt():
        from kvgraft.cli import main
    sys.exit(main())


if __name__ == "__main__":
    start()
