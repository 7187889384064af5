"""Records that the engine hands out, and the protocol of those who take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvgraft.types import GraftReport


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When what happened to a request: `time.perf_counter()` of the engine's process, None for what did not happen.

    Attributes:
        arrival: It arrived.
        begun: Its first attempt to be computed began, with a lookup.
        lookup: The lookup began of the attempt that its report is of, or of the last one if there is no report; later than
            `begun` if it lost its slots in between.
        graft: Copies of that attempt began; its slots were there.
        prefill: All that is reused was there, so that the rest of the prompt could be computed.
        first_token: Its first token was drawn.
        ended: It ended, however it did.
    """

    arrival: float
    begun: float | None
    lookup: float | None
    graft: float | None
    prefill: float | None
    first_token: float | None
    ended: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that ended, however it ended.

    Attributes:
        request_id: Its name; for logs and traces, never a metric label.
        outcome: `stop`, `length`, `abort` (cancelled by its owner), `refused` (it asked for what cannot be done) or `error`.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens generated.
        report: What was reused; None if it ended before its prompt was computed.
        queue_s: Seconds from arrival to its first admission; None if it was never admitted.
        ttft_s: Seconds from arrival to the first token; None if there was none.
        total_s: Seconds from arrival to the end.
        num_preemptions: How often it lost its slots and was computed again.
        times: Times of the events; None where none was noted.
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
    times: RequestTimes | None = None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the engine: one forward pass over rows of several requests, and the state after it.

    Attributes:
        seconds: Duration, bookkeeping included.
        prefill_rows: Prompt positions computed in it.
        decode_rows: Requests that got a further token from it.
        num_running: Admitted requests.
        num_waiting: Requests that wait for admission.
        slots_free: K/V slots without a holder.
        slots_request: K/V slots of running requests.
        slots_cached: K/V slots that only the prefix cache holds, or it and donors.
        slots_donor: K/V slots that donors alone hold.
        num_donors: Donors in all tiers.
        donor_tokens: Their tokens.
        host_bytes: Bytes of donors in host memory.
        prefix_host_tokens: Tokens of exact prefixes in host memory.
        num_sessions: Open sessions.
        slots_kept: Slots that are kept for sessions; part of those of requests and the prefix cache.
        repair_rows: Positions that running requests computed exactly besides their own rows (`repair_rows`).
        heal_rows: Positions of finished requests that were computed exactly beside the others.
        started: `time.perf_counter()` when it began; 0 where it was not noted.
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
    repair_rows: int = 0
    heal_rows: int = 0
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class IdleRecord:
    """A forward pass that no request waited for.

    Attributes:
        work: `heal` or `audit`.
        started: `time.perf_counter()` when it began.
        seconds: Duration, bookkeeping included.
    """

    work: str
    started: float
    seconds: float


class Recorder(Protocol):
    """Takes records on the engine's thread; must be quick and must not raise."""

    def record_request(self, record: RequestRecord) -> None:
        """Take in a request that has ended, however it did."""

    def record_step(self, record: StepRecord) -> None:
        """Take in a step after its outputs were handed out."""

    def record_idle(self, record: IdleRecord) -> None:
        """Take in a forward pass that no request waited for."""


class NullRecorder:
    """A recorder that keeps nothing."""

    def record_request(self, record: RequestRecord) -> None:
        """Ignore what became of a request."""

    def record_step(self, record: StepRecord) -> None:
        """Ignore what a step did."""

    def record_idle(self, record: IdleRecord) -> None:
        """Ignore work of idle time."""


class Recorders:
    """Several recorders of the same events, in order; one that fails keeps nothing from the others."""

    def __init__(self, recorders: Iterable[Recorder]) -> None:
        self._recorders = tuple(recorders)

    def record_request(self, record: RequestRecord) -> None:
        """Record a request that has ended; raises the first failure at the end."""
        self._each(lambda recorder: recorder.record_request(record))

    def record_step(self, record: StepRecord) -> None:
        """Record a step; raises the first failure at the end."""
        self._each(lambda recorder: recorder.record_step(record))

    def record_idle(self, record: IdleRecord) -> None:
        """Record a pass that no request waited for; raises the first failure at the end."""
        self._each(lambda recorder: recorder.record_idle(record))

    def _each(self, record: Callable[[Recorder], None]) -> None:
        failure: Exception | None = None
        for recorder in self._recorders:
            try:
                record(recorder)
            except Exception as error:  # noqa: BLE001 - raised again below
                failure = failure or error
        if failure is not None:
            raise failure
