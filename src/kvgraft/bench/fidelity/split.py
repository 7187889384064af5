"""Two halves of a suite that share no document, so that what was tuned on one is reported on the other.

Requests that are linked by documents form components. Small components, in the order of a hash of their names, go as a whole
to the half that has fewer requests. A large one (questions over one library of passages) is cut: its documents are walked
through from neighbour to neighbour, those reached first are one half, and requests with documents of both are dropped.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.bench.fidelity.request import FidelityRequest

DEV, TEST, ALL = "dev", "test", "all"
SPLITS = (DEV, TEST, ALL)
_LARGE = 0.25
"""Share of all requests from which on a component is cut; halves would be too unequal otherwise."""


def split(requests: Sequence[FidelityRequest], side: str) -> list[FidelityRequest]:
    """Return the requests of one half, in order. Depends on names of documents only, not on their order in files.

    Args:
        requests: Of a suite.
        side: `dev`, `test` or `all`.

    Complexity: O(requests x documents per request), and a sort of the documents.
    """
    if side == ALL:
        return list(requests)
    sides = _document_sides(requests)
    return [request for request in requests if {sides[key] for key in request.keys} == {side}]


def _document_sides(requests: Sequence[FidelityRequest]) -> dict[str, str]:
    neighbours: defaultdict[str, set[str]] = defaultdict(set)
    for request in requests:
        for key in request.keys:
            neighbours[key].update(request.keys)
    num_requests = Counter(request.keys[0] for request in requests)
    sides: dict[str, str] = {}
    filled = {DEV: 0, TEST: 0}
    for start in _sorted(neighbours):
        if start in sides:
            continue
        walk = _walk(start, neighbours)
        size = sum(num_requests[key] for key in walk)
        half = len(walk) // 2
        if half and size > _LARGE * len(requests):
            sides |= dict.fromkeys(walk[:half], DEV) | dict.fromkeys(walk[half:], TEST)
        else:
            side = min(filled, key=lambda each: filled[each])
            sides |= dict.fromkeys(walk, side)
            filled[side] += size
    return sides


def _walk(start: str, neighbours: dict[str, set[str]]) -> list[str]:
    """Yield the documents of a component, breadth first."""
    order, waiting, seen = [], deque([start]), {start}
    while waiting:
        order.append(waiting.popleft())
        new = _sorted(neighbours[order[-1]] - seen)
        seen.update(new)
        waiting.extend(new)
    return order


def _sorted(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=_digest)


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8, person=b"kvgraft.split").digest()
