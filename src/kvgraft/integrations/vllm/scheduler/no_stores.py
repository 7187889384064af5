"""What stands for the stores of an engine that has none: nothing is stored, found, read or measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvgraft.donors import Donor
    from kvgraft.integrations.vllm.messages import StoreReport, Write
    from kvgraft.types import DonorId, Match


class _NoDonors:
    """No donor is in a store."""

    def holder_of(self, donor_id: DonorId) -> int | None:
        """Return None."""

    def is_read(self, match: Match) -> bool:
        """Return False."""
        return False

    def demote(self, donor_id: DonorId) -> bool:
        """Return False: there is no copy to go back to."""
        return False

    def unbind(self, donor_id: DonorId) -> None:
        """Do nothing."""


class _NoSpeed:
    """Nothing is weighed against reads, so prefill is not measured."""

    def step_begins(self, num_tokens: int, *, is_prefill_alone: bool) -> None:
        """Do nothing."""

    def step_ends(self) -> None:
        """Do nothing."""


class _NoTerms:
    """All is at hand: it costs nothing to read and is not waited for."""

    def cost(self, match: Match) -> float:
        """Return 0."""
        return 0.0

    def patience_s(self, matches: Iterable[Match], cost: float) -> float:
        """Return 0."""
        return 0.0


class NoStores:
    """As `Stores` without a store."""

    are_files = True

    def __init__(self) -> None:
        self.donors, self.speed, self.terms = _NoDonors(), _NoSpeed(), _NoTerms()

    def __bool__(self) -> bool:
        return False

    def receive(self, report: StoreReport) -> None:
        """Do nothing."""

    def news(self, reserved_tokens: int) -> None:
        """Do nothing."""

    def touch(self, donor_ids: Iterable[DonorId]) -> None:
        """Do nothing."""

    def write_of(self, donor: Donor) -> Write | None:
        """Return None."""

    def tier_of(self, donor_id: DonorId) -> str:
        """Return `host`, where all donors are."""
        return "host"

    def reset(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
