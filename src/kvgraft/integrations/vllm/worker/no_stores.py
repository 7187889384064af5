"""What stands for the stores of a rank that has none, and for reads from them: nothing is written, read or awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.integrations.vllm.messages import Graft
    from kvgraft.memory.block import KVBlock
    from kvgraft.memory.store.record import DonorRecord
    from kvgraft.types import DonorId


class NoRankStores:
    """As `RankStores` without a store."""

    def forget_space(self) -> None:
        """Do nothing."""

    def write(self, record: DonorRecord, read: Callable[[], KVBlock | None]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class NoGraftReads:
    """As `GraftReads` of a rank without a store, where no graft names a stored donor."""

    def begin(self, command: Graft) -> None:
        """Do nothing."""

    def give_up(self, request_id: str) -> None:
        """Do nothing."""

    def drop(self, donor_id: DonorId) -> None:
        """Do nothing."""

    def clear(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""

    def poll(self) -> tuple[dict[str, list[tuple[int, KVBlock]]], dict[str, str]]:
        """Return that nothing has come and nothing failed."""
        return {}, {}

    def take_waited_ms(self, request_id: str) -> float:
        """Return 0."""
        return 0.0

    def close(self) -> None:
        """Do nothing."""
