"""Cut matches to regions that SGLang can load: after the exact prefix, heads left to compute, whole pages. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select.base import SelectionContext
from kvgraft.graft.select.guard import PolicySteps

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import Match


def loadable(
    matches: Sequence[Match], *, start: int, end: int, page_size: int, policy: SelectionPolicy, min_run: int
) -> tuple[list[Match], dict[int, int]]:
    """Cut `matches` to regions that can be loaded as whole pages.

    A token that the policy wants computed again becomes part of the gap before the next region, because SGLang
    computes consecutive tokens only.

    Args:
        matches: Sorted and disjoint.
        start: Length of the exact prefix.
        end: Positions from it on are computed, for their logits are wanted.
        page_size: Tokens of a page; targets begin and end at multiples of it.
        policy: Takes one step that does not look at attention.
        min_run: Regions that become shorter are dropped.

    Returns:
        The regions, sorted and disjoint, and by the start of each how many tokens of its run before it the policy had
        computed again.

    Complexity: O(tokens matched).
    """
    clipped = [part for match in matches if (part := cut(match, start, end)) is not None]
    regions, recomputed = [], {}
    for part, num_before in _kept(clipped, end, policy):
        region = _aligned(part, page_size)
        if region is not None and region.length >= min_run:
            regions.append(region)
            recomputed[region.target_start] = num_before
    return regions, recomputed


def cut(match: Match, start: int, end: int) -> Match | None:
    """Return the part of `match` in `[start, end)`, or None."""
    begin, stop = max(match.target_start, start), min(match.target_end, end)
    if stop <= begin:
        return None
    return match.part(begin, stop)


def _aligned(match: Match, page_size: int) -> Match | None:
    """Shrink to whole pages of the prompt."""
    return cut(match, -(-match.target_start // page_size) * page_size, match.target_end // page_size * page_size)


def _kept(matches: list[Match], num_tokens: int, policy: SelectionPolicy) -> Iterator[tuple[Match, int]]:
    """Yield what the policy leaves of `matches`, and how many tokens of the same match it takes before each.

    It is not asked about those in their own places.
    """
    shifted = [match for match in matches if match.is_shifted]
    if not shifted:
        yield from ((match, 0) for match in matches)
        return
    reused = np.concatenate([np.arange(match.target_start, match.target_end) for match in shifted])
    distance = np.concatenate([np.arange(match.length) for match in shifted])
    copied = np.concatenate([np.arange(match.target_start, match.target_end) for match in matches])
    live = np.setdiff1d(np.arange(num_tokens), copied, assume_unique=True)
    step = PolicySteps(policy, SelectionContext(num_tokens, reused, distance, live)).first()
    keep = np.ones(num_tokens, np.bool_)
    keep[step.positions] = False
    for match in matches:
        position = match.target_start
        edges = np.flatnonzero(np.diff(keep[match.target_start : match.target_end], prepend=False, append=False))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            part = cut(match, match.target_start + first, match.target_start + last)
            if part is not None:
                yield part, part.target_start - position
                position = part.target_end
