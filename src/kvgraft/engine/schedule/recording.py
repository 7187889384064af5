"""Records of every step and every request that ends."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from kvgraft.observability import IdleRecord, RequestRecord, RequestTimes, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.sessions import Sessions
    from kvgraft.engine.schedule.active import ActiveRequest
    from kvgraft.engine.schedule.scheduler import ScheduledStep, Scheduler
    from kvgraft.observability import Recorder

logger = logging.getLogger(__name__)


class Recording:
    """Feeds a recorder of the caller's: its failures stop nothing, and the first is logged."""

    def __init__(self, recorder: Recorder, space: KVSpace, scheduler: Scheduler, sessions: Sessions) -> None:
        self._recorder = recorder
        self._space = space
        self._scheduler = scheduler
        self._sessions = sessions
        self._has_failed = False

    def step(self, step: ScheduledStep, started: float, seconds: float, heal_rows: int) -> None:
        """Record a step that began at `started`, and the state after it."""
        self._record(lambda: self._recorder.record_step(self._step_record(step, started, seconds, heal_rows)))

    def idle(self, work: str, started: float, seconds: float) -> None:
        """Record a forward pass that no request waited for."""
        self._record(lambda: self._recorder.record_idle(IdleRecord(work, started, seconds)))

    def request(self, active: ActiveRequest, outcome: str) -> None:
        """Record a request that has ended: with its finish reason, `abort` or `error`."""
        self._record(lambda: self._recorder.record_request(_request_record(active, outcome)))

    def _record(self, record: Callable[[], None]) -> None:
        try:
            record()
        except Exception:
            if not self._has_failed:
                logger.exception("a recorder failed; further failures of it are not logged")
            self._has_failed = True

    def _step_record(self, step: ScheduledStep, started: float, seconds: float, heal_rows: int) -> StepRecord:
        space, usage = self._space, self._space.usage()
        return StepRecord(
            seconds=seconds,
            prefill_rows=step.prefill_rows,
            decode_rows=step.num_streams,
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            slots_free=usage.free,
            slots_request=usage.request,
            slots_cached=usage.cached,
            slots_donor=usage.donor,
            num_donors=len(space.donors),
            donor_tokens=space.donors.num_tokens,
            host_bytes=space.host.used_bytes,
            prefix_host_tokens=space.prefix_host_tokens,
            num_sessions=len(self._sessions),
            slots_kept=space.kept.num_slots,
            repair_rows=step.repair_rows,
            heal_rows=heal_rows,
            started=started,
        )


def _request_record(active: ActiveRequest, outcome: str) -> RequestRecord:
    arrival, ended = active.request.arrival, time.perf_counter()
    return RequestRecord(
        request_id=active.request.request_id,
        outcome=outcome,
        prompt_tokens=len(active.request.token_ids),
        output_tokens=len(active.output_ids),
        report=active.report,
        queue_s=None if active.admitted_at is None else active.admitted_at - arrival,
        ttft_s=None if active.first_token_at is None else active.first_token_at - arrival,
        total_s=ended - arrival,
        num_preemptions=active.num_preemptions,
        times=RequestTimes(
            arrival=arrival,
            begun=active.begun_at,
            lookup=active.moments.get("lookup"),
            graft=active.moments.get("graft"),
            prefill=active.moments.get("prefill"),
            first_token=active.first_token_at,
            ended=ended,
        ),
    )
