"""One decision for all tensor-parallel ranks: rank 0's plan is carried to the others, and every load is confirmed by all.

Every rank plans, so that all catalogues see the same lookups and stay alike, and then takes rank 0's plan. A span travels
with a digest of the tokens that it copies. A rank on which the donor is another text does not load, and so nobody does.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from kvgraft.donors import new_secret
from kvgraft.integrations.sglang.planning.spans import Span
from kvgraft.integrations.sglang.stored.cold import is_cold
from kvgraft.types import DonorId, Fidelity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.donors import Donor

_Shared = TypeVar("_Shared")
_KEEP, _REPLACE = 0, 1
_FIELDS = 7


@dataclass(frozen=True, slots=True)
class Decision:
    """What is loaded for a request: as decided before (`spans` is None), or these spans."""

    spans: tuple[Span, ...] | None


class Ranks(Protocol):
    """The ranks that serve one request together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """Number of this one."""

    @property
    def size(self) -> int:
        """How many there are."""

    def decide(self, make: Callable[[], Decision]) -> Decision:
        """Call `make` on every rank, and return what it returned on rank 0. `make` must not raise."""

    def confirm(self, num_tokens: int) -> int:
        """Return `num_tokens` if all ranks say the same, else -1."""

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of `numbers`, float32 on the CPU; the same on all of them."""

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """Return the lowest of each of `numbers`, as many on every rank."""

    def shared(self, make: Callable[[], _Shared]) -> _Shared:
        """Call `make` on rank 0 alone, and return on every rank what it returned. `make` must not raise."""

    def gathered(self, part: str) -> list[str]:
        """Return what every rank gave, in order of ranks."""


def shared_secret(group: dist.ProcessGroup) -> bytes:
    """Return rank 0's new secret on every rank, so that their catalogues find the same donors."""
    secret = torch.frombuffer(bytearray(new_secret()), dtype=torch.uint8)
    dist.broadcast(secret, group=group, group_src=0)
    return secret.numpy().tobytes()


class OneRank:
    """No tensor parallelism."""

    rank, size = 0, 1

    def decide(self, make: Callable[[], Decision]) -> Decision:
        """Decide here."""
        return make()

    def confirm(self, num_tokens: int) -> int:
        """Agree with oneself."""
        return num_tokens

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Be the sum."""
        return numbers

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """Be the lowest."""
        return list(numbers)

    def shared(self, make: Callable[[], _Shared]) -> _Shared:
        """Make it here."""
        return make()

    def gathered(self, part: str) -> list[str]:
        """Be the only one."""
        return [part]


class TensorParallelRanks:
    """Ranks of a CPU process group; each call costs a broadcast or a reduction of a few numbers."""

    def __init__(self, group: dist.ProcessGroup, donor_of: Callable[[DonorId], Donor | None]) -> None:
        self._group = group
        self._donor_of = donor_of
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def decide(self, make: Callable[[], Decision]) -> Decision:
        """Broadcast the spans, donors by id and digest."""
        mine = make()
        numbers = self._encoded(mine) if self.rank == 0 else []
        header = torch.tensor([len(numbers)], dtype=torch.int64)
        dist.broadcast(header, group=self._group, group_src=0)
        payload = (
            torch.tensor(numbers, dtype=torch.int64) if self.rank == 0 else torch.empty(int(header), dtype=torch.int64)
        )
        dist.broadcast(payload, group=self._group, group_src=0)
        return self._decoded(payload.tolist())

    def confirm(self, num_tokens: int) -> int:
        """Reduce minimum and maximum at once."""
        bounds = torch.tensor([num_tokens, -num_tokens], dtype=torch.int64)
        dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=self._group)
        low, high = int(bounds[0]), -int(bounds[1])
        return low if low == high else -1

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """Reduce."""
        dist.all_reduce(numbers, op=dist.ReduceOp.SUM, group=self._group)
        return numbers

    def lowest(self, numbers: Sequence[int]) -> list[int]:
        """Reduce."""
        reduced = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=self._group)
        return [int(number) for number in reduced]

    def shared(self, make: Callable[[], _Shared]) -> _Shared:
        """Broadcast what rank 0 makes."""
        made: list[Any] = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(made, group=self._group, group_src=0)
        result: _Shared = made[0]
        return result

    def gathered(self, part: str) -> list[str]:
        """Gather."""
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part, group=self._group)
        return parts

    def _encoded(self, decision: Decision) -> list[int]:
        if decision.spans is None:
            return [_KEEP]
        numbers = [_REPLACE]
        for span in decision.spans:
            assert span.donor is not None
            assert span.fidelity is not Fidelity.SUBSTITUTED, "only catalogued donors can be sent"
            is_exact, donor_id = span.fidelity is Fidelity.EXACT, span.donor.donor_id
            digest = _digest(span.donor, span.donor_start, span.length, is_exact=is_exact)
            numbers += [span.start, span.length, donor_id, span.donor_start, span.recomputed, int(is_exact), digest]
        return numbers

    def _decoded(self, numbers: list[int]) -> Decision:
        if numbers[0] == _KEEP:
            return Decision(None)
        rows = [numbers[first : first + _FIELDS] for first in range(1, len(numbers), _FIELDS)]
        return Decision(tuple(self._span(row) for row in rows))

    def _span(self, numbers: list[int]) -> Span:
        start, length, donor_id, donor_start, recomputed, is_exact, digest = numbers
        donor = self._donor_of(DonorId(donor_id))
        if donor is not None and _digest(donor, donor_start, length, is_exact=bool(is_exact)) != digest:
            donor = None
        fidelity = Fidelity.EXACT if is_exact else Fidelity.SHIFTED
        return Span(start, length, donor, donor_start, recomputed, fidelity, is_stored=is_cold(DonorId(donor_id)))


def _digest(donor: Donor, start: int, length: int, *, is_exact: bool) -> int:
    """Digest what a span copies: the tokens and where and behind what they were encoded; 62 bits.

    Of an exact span those in front of it, too: what they are is why it is exact.
    """
    first = 0 if is_exact else start
    digest = hashlib.blake2b(donor.token_ids[first : start + length].tobytes(), digest_size=8)
    digest.update(f"{donor.start_position + start} {donor.generation}".encode() + donor.namespace.key)
    if is_exact:
        digest.update(donor.front)
    return int.from_bytes(digest.digest(), "little") >> 2
