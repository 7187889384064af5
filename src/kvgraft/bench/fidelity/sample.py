"""Choice of the requests to measure, and of the prompts to read before each. Runs no model.

Measured requests keep their order of arrival. They form blocks; each begins with an empty cache, which bounds its memory and
makes an interrupted run resumable. Before a request is measured, earlier requests of the pack are read that have its
documents, for each document the latest one, unless this block has read one already.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvgraft.bench.fidelity.request import FidelityRequest

BLOCK_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class DrawnRequests:
    """Ascending indices of drawn requests, and how many others were drawn and left out for their length."""

    indices: tuple[int, ...]
    too_long: int


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """A request to measure.

    Attributes:
        index: Of the request in its suite.
        request: The request.
        donors: Prompts to read before it.
        is_read: Whether later requests of its block need that it is read, too, when it has been measured.
    """

    index: int
    request: FidelityRequest
    donors: tuple[str, ...]
    is_read: bool


def draw(requests: Sequence[FidelityRequest], limit: int, fits: Callable[[str], bool], seed: int) -> DrawnRequests:
    """Draw `limit` requests that fit, without replacement; fewer if there are not so many."""
    order = list(range(len(requests)))
    random.Random(seed).shuffle(order)
    chosen: list[int] = []
    too_long = 0
    for index in order:
        if len(chosen) == limit:
            break
        if fits(requests[index].prompt):
            chosen.append(index)
        else:
            too_long += 1
    return DrawnRequests(tuple(sorted(chosen)), too_long)


def blocks(
    requests: Sequence[FidelityRequest], indices: Sequence[int], fits: Callable[[str], bool]
) -> list[list[SampledRequest]]:
    """Cut the chosen requests into blocks and say what is read before each.

    A request that brings its donor along is a block of its own.
    """
    if any(requests[index].donor is not None for index in indices):
        return [[_given(index, requests[index])] for index in indices]
    starts = range(0, len(indices), BLOCK_REQUESTS)
    return [_block(requests, indices[start : start + BLOCK_REQUESTS], fits) for start in starts]


def _given(index: int, request: FidelityRequest) -> SampledRequest:
    prompt = request.donor_prompt
    return SampledRequest(index, request, () if prompt is None else (prompt,), is_read=False)


def _block(
    requests: Sequence[FidelityRequest], indices: Sequence[int], fits: Callable[[str], bool]
) -> list[SampledRequest]:
    read: set[str] = set()
    steps = []
    for number, index in enumerate(indices):
        request = requests[index]
        donors = _donors(requests, index, read, fits)
        read.update(key for donor in donors for key in requests[donor].keys)
        needed = {key for later in indices[number + 1 :] for key in requests[later].keys}
        is_read = bool(needed & set(request.keys))
        read.update(request.keys if is_read else ())
        steps.append(SampledRequest(index, request, tuple(requests[donor].prompt for donor in donors), is_read))
    return steps


def _donors(
    requests: Sequence[FidelityRequest], index: int, read: Iterable[str], fits: Callable[[str], bool]
) -> list[int]:
    """Return earlier requests, ascending, that have the documents of `requests[index]` that are not among `read`."""
    missing = set(requests[index].keys) - set(read)
    chosen = []
    for earlier in range(index - 1, -1, -1):
        if not missing:
            break
        if missing.intersection(requests[earlier].keys) and fits(requests[earlier].prompt):
            chosen.append(earlier)
            missing.difference_update(requests[earlier].keys)
    return chosen[::-1]
