"""Records that the engine hands out, and the protocol of those who take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvgraft.types import GraftReport


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that ended, however it ended.

    Attributes:
        request_id: Its name; for logs and traces, never a metric label.
        outcome: `stop`, `length`, `abort` (cancelled by its owner) or `error`.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens generated.
        report: What was reused; None if it ended before its prompt was computed.
        queue_s: Seconds from arrival to its first admission; None if it was never admitted.
        ttft_s: Seconds from arrival to the first token; None if there was none.
        total_s: Seconds from arrival to the end.
        num_preemptions: How often it lost its slots and was computed again.
    """

    request_id: str
    outcome: str
    prompt_tokens: int
    output_tokens: int
    report: GraftReport | None
    queue_s: float | None
    ttft_s: float | None
    total_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine: one forward pass over rows of several requests, and the state behind it.

    Attributes:
        seconds: Duration, bookkeeping included.
        prefill_rows: Prompt positions computed in it.
        decode_rows: Requests that got a further token from it.
        num_running: Admitted requests.
        num_waiting: Requests that wait for admission.
        slots_free: K/V slots that nobody holds.
        slots_request: K/V slots of running requests.
        slots_cached: K/V slots that only the prefix cache holds, or it and donors.
        slots_donor: K/V slots that donors alone hold.
        num_donors: Donors in all tiers.
        donor_tokens: Their tokens.
        host_bytes: Bytes of donors in host memory.
        prefix_host_tokens: Tokens of exact prefixes in host memory.
        num_sessions: Open sessions.
        slots_kept: Slots that are kept for sessions; part of those of requests and the prefix cache.
    """

    seconds: float
    prefill_rows: int
    decode_rows: int
    num_running: int
    num_waiting: int
    slots_free: int
    slots_request: int
    slots_cached: int
    slots_donor: int
    num_donors: int
    donor_tokens: int
    host_bytes: int
    prefix_host_tokens: int = 0
    num_sessions: int = 0
    slots_kept: int = 0


class Recorder(Protocol):
    """Takes records on the engine's thread; must be quick and must not raise."""

    def record_request(self, record: RequestRecord) -> None:
        """Take in a request that has ended, however it did."""

    def record_step(self, record: StepRecord) -> None:
        """Take in a step after its outputs were handed out."""


class NullRecorder:
    """A recorder for engines that nobody watches; keeps nothing."""

    def record_request(self, record: RequestRecord) -> None:
        """Ignore what became of a request."""

    def record_step(self, record: StepRecord) -> None:
        """Ignore what a step did."""
