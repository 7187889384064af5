"""Finished requests that wait to be healed, the one that is worth it most first. Runs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvgraft.donors import DonorCatalogue
    from kvgraft.engine.model.flops import ModelFlops
    from kvgraft.engine.requests.request import Request
    from kvgraft.types import DonorId, Namespace, TokenArray

_GLANCE = 64
"""First tokens that are compared: most texts differ there."""
MOST_CANDIDATES = 256
"""Texts that wait; when there are more, those worth least are not healed. With 8K tokens each, 16 MiB of token ids."""


@dataclass(slots=True, eq=False)
class Candidate:
    """A finished request that left approximate K/V, and how far its text is exact by now.

    Attributes:
        request: Asks for the exact K/V of prompt and answer, in the name of the request that ended.
        namespace: Of the K/V, narrowed to the RoPE angles of the text's length.
        donors: Donors of generation > 0 that were made of it; some may be gone.
        frontier: Positions that were exact when it was looked at last; fewer if they were evicted since.
        num_computed: Rows that healing has computed for it, those that were evicted again included.
        made: Exact donors made of it so far; some may be gone.
        num_turns: Turns of its conversation so far: it is the front that the next one needs.
    """

    request: Request
    namespace: Namespace
    donors: list[DonorId]
    frontier: int = 0
    num_computed: int = 0
    made: list[DonorId] = field(default_factory=list)
    num_turns: int = 1

    @property
    def token_ids(self) -> TokenArray:
        """int64, prompt and answer."""
        return self.request.token_ids

    @property
    def num_tokens(self) -> int:
        """Positions to be healed, those before the frontier included."""
        return len(self.request.token_ids)


class HealQueue:
    """A bounded set of candidates, the hottest first. Not thread-safe.

    Hot is what serves much for its cost: the sum of value x generation x tokens over its donors of generation > 0 that still
    live, and all that is still approximate for every turn that went on from it, divided by the operations that are left to
    compute. The value is the catalogue's, by which donors are evicted, too. Texts without either come last, the newest first:
    healing them serves the same prompt alone.
    """

    def __init__(self, donors: DonorCatalogue, flops: ModelFlops) -> None:
        self._donors = donors
        self._flops = flops
        self._waiting: list[Candidate] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._waiting)

    def add(self, candidate: Candidate) -> list[Candidate]:
        """Take in a text instead of those that it begins with; returns those without room, maybe itself.

        A text that another one begins with or is equal to adds its donors to that one.
        """
        for other in list(self._waiting):
            if not _shares_beginning(candidate, other):
                continue
            if other.num_tokens >= candidate.num_tokens:
                other.donors += candidate.donors
                return []
            candidate.donors += other.donors
            candidate.made += other.made
            candidate.num_turns += other.num_turns
            candidate.frontier = max(candidate.frontier, other.frontier)
            self._waiting.remove(other)
        self._waiting.append(candidate)
        if len(self._waiting) <= MOST_CANDIDATES:
            return []
        coldest = min(self._waiting, key=self._heat)  # of equal ones the oldest
        self._waiting.remove(coldest)
        return [coldest]

    def best(self, is_due: Callable[[Candidate], bool]) -> Candidate | None:
        """Return the candidate to heal now, of those that are due.

        Complexity: O(candidates and their donors).
        """
        return max(filter(is_due, reversed(self._waiting)), key=self._heat, default=None)

    def remove(self, candidate: Candidate) -> None:
        """Forget a candidate that is healed or is not to be."""
        self._waiting.remove(candidate)

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()

    def _heat(self, candidate: Candidate) -> float:
        gain = float((candidate.num_turns - 1) * (candidate.num_tokens - candidate.frontier))
        for donor_id in candidate.donors:
            donor = self._donors.get(donor_id)
            if donor is not None:
                gain += self._donors.value(donor_id) * donor.generation * donor.num_tokens
        return gain / self._flops.of_range(candidate.frontier, candidate.num_tokens + 1)


def _shares_beginning(one: Candidate, other: Candidate) -> bool:
    """Return whether one of two texts of the same namespace begins with the other."""
    shared = min(one.num_tokens, other.num_tokens)
    if one.namespace != other.namespace or one.token_ids[shared - 1] != other.token_ids[shared - 1]:
        return False
    # Hundreds of long texts wait, of which nearly all differ at once.
    ends = (slice(0, min(shared, _GLANCE)), slice(0, shared))
    return all(np.array_equal(one.token_ids[part], other.token_ids[part]) for part in ends)
