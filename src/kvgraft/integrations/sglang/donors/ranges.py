"""Arithmetic on half-open ranges of row positions. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Range = tuple[int, int]


def subtract(ranges: Sequence[Range], removed: Sequence[Range]) -> list[Range]:
    """Return what is left of `ranges` without `removed`; both ascending and disjoint. Complexity: O(both)."""
    left: list[Range] = []
    for start, stop in ranges:
        position = start
        for first, last in removed:
            if last <= position or first >= stop:
                continue
            if first > position:
                left.append((position, first))
            position = last
        if position < stop:
            left.append((position, stop))
    return left
