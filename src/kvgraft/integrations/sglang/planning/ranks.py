"""One decision for all tensor-parallel ranks: rank 0's plan is carried to the others, and every load is confirmed by all.

Ranks wait for one another in work that they do `together` alone: what fails on one of them fails on all.

Every rank plans, so that all catalogues see the same lookups and stay alike, and then takes rank 0's plan. A span travels
with a digest of the tokens that it copies. A rank on which the donor is another text does not load, and so no rank does.

With the plan ranks compare what their donors are. Where a capture, a registration or a lookup failed on one rank alone they
differ, and all ranks forget them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from kvgraft.donors import new_secret
from kvgraft.integrations.sglang.planning.spans import LoadSpan
from kvgraft.reuse.together import MOST_NUMBERS, Together
from kvgraft.types import CONTINUATION, DonorId, Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.donors import Donor

    Spans = tuple[LoadSpan, ...]

_Shared = TypeVar("_Shared")
_KEEP = -1
_FIELDS = 8
_FIDELITIES = (Fidelity.SHIFTED, Fidelity.EXACT, Fidelity.CONTINUED)
"""Classes of spans by the number that is sent."""


def shared_secret(group: dist.ProcessGroup) -> bytes:
    """Return rank 0's new secret on every rank, so that their catalogues find the same donors."""
    secret = torch.frombuffer(bytearray(new_secret()), dtype=torch.uint8)
    dist.broadcast(secret, group=group, group_src=0)
    return secret.numpy().tobytes()


class Chosen(NamedTuple):
    """What all ranks do.

    Attributes:
        spans: Rank 0's; None for what was chosen before.
        are_alike: Whether donors are the same on all ranks; if not, nothing can be loaded.
    """

    spans: Spans | None
    are_alike: bool = True


class Ranks:
    """The ranks that serve one request together, all of which make the same calls in the same order; here the only one.

    Attributes:
        rank: Number of this one.
        size: Number of ranks.
        together: Does work on all ranks, or on none.
    """

    rank, size = 0, 1

    def __init__(self) -> None:
        self.together = Together(list)

    def chosen(self, spans: Spans | None, donors: int, goes_on: Donor | None = None) -> Chosen:
        """Return rank 0's spans on every rank, unless `donors`, a digest of them, differ; None for what was chosen before.

        `goes_on` is the text that the prompt goes on from here, which no catalogue has; other ranks have it in their trees.
        """
        return Chosen(spans)

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of `numbers`, float32 on the CPU; the same on all of them."""
        return numbers

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """Return the lowest of each of `numbers`, as many on every rank."""
        return list(numbers)

    def shared(self, make: Callable[[], _Shared]) -> _Shared:
        """Call `make` on rank 0 alone, and return on every rank what it returned."""
        return make()

    def gathered(self, part: str) -> list[str]:
        """Return the parts of all ranks, in order of ranks."""
        return [part]


class TensorParallelRanks(Ranks):
    """Ranks of a CPU process group; each call costs a reduction of a few numbers, and another operation where it has more."""

    def __init__(self, group: dist.ProcessGroup, donor_of: Callable[[DonorId], Donor | None]) -> None:
        self.together = Together(self._lowest)
        self._group = group
        self._donor_of = donor_of
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def chosen(self, spans: Spans | None, donors: int, goes_on: Donor | None = None) -> Chosen:
        """Reduce the number of spans and the bounds of `donors`, and broadcast the spans, donors by id and digest."""
        rows = [encoded(span) for span in spans or () if self.rank == 0]
        count = _KEEP if spans is None or self.rank else len(rows)
        negated, low, high = self.together.meet("chosen", -count, donors, -donors)
        count = -negated
        if low != -high:
            return Chosen(None, are_alike=False)
        if count <= 0:
            return Chosen(None if count == _KEEP else ())
        payload = torch.tensor(rows, dtype=torch.int64) if rows else torch.empty(count, _FIELDS, dtype=torch.int64)
        dist.broadcast(payload, group=self._group, group_src=0)
        return Chosen(tuple(self._decoded(row, goes_on) for row in payload.tolist()))

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Reduce."""
        self.together.meet(f"total of {numbers.numel()}")
        dist.all_reduce(numbers, op=dist.ReduceOp.SUM, group=self._group)
        return numbers

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """Reduce."""
        place = f"lowest of {len(numbers)}"
        if len(numbers) <= MOST_NUMBERS:
            return self.together.meet(place, *map(int, numbers))
        self.together.meet(place)
        return self._lowest(numbers)

    def shared(self, make: Callable[[], _Shared]) -> _Shared:
        """Broadcast from rank 0."""
        made: list[Any] = [make() if self.rank == 0 else None]
        self.together.meet("shared")
        dist.broadcast_object_list(made, group=self._group, group_src=0)
        result: _Shared = made[0]
        return result

    def gathered(self, part: str) -> list[str]:
        """Gather."""
        self.together.meet("gathered")
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part, group=self._group)
        return parts

    def _lowest(self, numbers: Sequence[int]) -> list[int]:
        reduced = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in reduced]

    def _decoded(self, numbers: list[int], goes_on: Donor | None = None) -> LoadSpan:
        start, length, donor_id, donor_start, recomputed, fidelity, is_stored, digest = numbers
        donor = goes_on if donor_id == CONTINUATION else self._donor_of(DonorId(donor_id))
        is_in_place = _FIDELITIES[fidelity] is not Fidelity.SHIFTED
        if donor is not None and _digest(donor, donor_start, length, is_in_place=is_in_place) != digest:
            donor = None
        kind = _FIDELITIES[fidelity]
        return LoadSpan(start, length, donor, donor_start, recomputed, kind, is_stored=bool(is_stored))


def encoded(span: LoadSpan) -> list[int]:
    """Return a span of a catalogued donor, or of what the prompt goes on from, as it is sent."""
    assert span.donor is not None
    assert span.fidelity is not Fidelity.SUBSTITUTED, "only catalogued donors can be sent"
    is_in_place = span.fidelity is not Fidelity.SHIFTED
    digest = _digest(span.donor, span.donor_start, span.length, is_in_place=is_in_place)
    place = [span.start, span.length, span.donor.donor_id, span.donor_start, span.recomputed]
    return [*place, _FIDELITIES.index(span.fidelity), int(span.is_stored), digest]


def _digest(donor: Donor, start: int, length: int, *, is_in_place: bool) -> int:
    """Digest the tokens of a span and the position and text after which they were encoded; 62 bits.

    Of one in its own place also the tokens before it, which make it that.
    """
    first = 0 if is_in_place else start
    digest = hashlib.blake2b(donor.token_ids[first : start + length].tobytes(), digest_size=8)
    digest.update(f"{donor.start_position + start} {donor.generation}".encode() + donor.namespace.key)
    if is_in_place:
        digest.update(donor.front)
    return int.from_bytes(digest.digest(), "little") >> 2
