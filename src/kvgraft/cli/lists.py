"""Lists on the command line."""

from __future__ import annotations

import argparse


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse `1024,4096`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1024,4096") from error
