"""What a rank has to say until vLLM asks: ended loads, blocks without K/V, and the events of its next report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.messages import NOTHING_OF_STORES, StoreReport, WorkerReport

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.messages import TextId
    from kvgraft.reuse.outcome import GraftOutcome
    from kvgraft.types import DonorId


@dataclass(frozen=True, slots=True)
class RankState:
    """What a report says of a rank whether or not anything happened: see `WorkerReport`."""

    refusal: str = ""
    is_proved: bool = False
    host_bytes: int = 0
    num_weight_changes: int = 0


@dataclass(slots=True, eq=False)
class Outbox:
    """Events of one rank since they were last taken; each is taken once, whole.

    Attributes:
        loaded: Requests whose asynchronous grafts have ended.
        failed: Those among them that failed, where blocks do not say so.
        failed_blocks: Blocks that failed grafts left without K/V.
        outcomes: Of grafts, by request.
        repairs: Outcomes of repairs, by request.
        lost_texts: Texts that are not captured.
        lost_donors: Donors whose K/V could not be kept.
        num_failed_copies: Texts and donors that could not be copied to host memory, or written.
        reported: State of the rank as it was last reported.
    """

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    failed_blocks: set[int] = field(default_factory=set)
    outcomes: dict[str, GraftOutcome] = field(default_factory=dict)
    repairs: dict[str, GraftOutcome] = field(default_factory=dict)
    lost_texts: set[TextId] = field(default_factory=set)
    lost_donors: set[DonorId] = field(default_factory=set)
    num_failed_copies: int = 0
    reported: RankState = RankState()

    def lose(self, donor_ids: set[DonorId]) -> None:
        """Note donors whose K/V did not arrive in host memory."""
        self.lost_donors |= donor_ids
        self.num_failed_copies += len(donor_ids)

    def take_loaded(self) -> tuple[set[str], set[str]]:
        """Return asynchronous grafts that ended, and those among them that failed."""
        loaded, failed = self.loaded, self.failed
        self.loaded, self.failed = set(), set()
        return loaded, failed

    def take_failed_blocks(self) -> set[int]:
        """Return blocks without K/V."""
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_report(self, state: RankState, stored: StoreReport, *, fallback: str, is_due: bool) -> WorkerReport | None:
        """Return the report of a step; None if there is nothing to report.

        Args:
            state: Of the rank now.
            stored: Its report of stores.
            fallback: Name of the policy that took the place of the configured one, or empty.
            is_due: Whether the scheduler waits for a report in any case.
        """
        is_news = is_due or self.outcomes or self.repairs or self.lost_texts or self.lost_donors
        if not is_news and state == self.reported and stored == NOTHING_OF_STORES:
            return None
        report = WorkerReport(
            self.outcomes,
            frozenset(self.lost_texts),
            frozenset(self.lost_donors),
            state.refusal,
            state.host_bytes,
            state.num_weight_changes,
            stored,
            state.is_proved and not self.reported.is_proved,
            self.repairs,
            self.num_failed_copies,
            fallback,
        )
        self.reported = state
        self.outcomes, self.repairs, self.lost_texts, self.lost_donors = {}, {}, set(), set()
        self.num_failed_copies = 0
        return report
