"""Progress bars on stderr for long commands; silent where stderr is no terminal or tqdm is not installed."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[], object]]:
    """Give a function that advances the bar by one."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda: None
        return
    with tqdm(total=total, unit=f" {unit}", disable=not sys.stderr.isatty(), leave=False) as bar:
        yield bar.update
