"""How far computed text is from exact: the generation of each run between reused ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class ComputedRun(NamedTuple):
    """Positions `[start, stop)` that were computed, and the generation of a donor made of them."""

    start: int
    stop: int
    generation: int


def computed_runs(reused: Iterable[tuple[int, int, int]], start: int, stop: int) -> Iterator[ComputedRun]:
    """Yield the runs of `[start, stop)` that were computed and not copied.

    A token's generation is one more than the highest one that it attended to, and 0 behind nothing copied.

    Args:
        reused: Ascending, disjoint `(start, stop, generation of the donor)` of what was copied, some perhaps in front of
            `start`.
        start: First position that counts.
        stop: First position behind.

    Complexity: O(reused).
    """
    attended = 0
    for first, last, generation in reused:
        if start < min(first, stop):
            yield ComputedRun(start, min(first, stop), attended)
        attended = max(attended, 1 + generation)
        start = max(start, last)
    if start < stop:
        yield ComputedRun(start, stop, attended)
