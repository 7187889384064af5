"""The engine: requests go in, a step at a time runs them, tokens come out. `LLM` and `AsyncLLM` stand on it."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.active import ActiveRequest
from kvgraft.engine.assembly import adapter_and_prefix, cache_manager
from kvgraft.engine.audit import Auditor
from kvgraft.engine.loading import LoadedModel, fingerprint, load_model
from kvgraft.engine.pace import Pace
from kvgraft.engine.request_builder import RequestBuilder
from kvgraft.engine.risk import HeldRisk
from kvgraft.engine.sampling import Sampler
from kvgraft.engine.scheduler import Scheduler
from kvgraft.engine.self_check import PROBE_SLOTS, SelfCheckReport, self_check
from kvgraft.engine.text import OutputText
from kvgraft.errors import ConfigError, OverloadedError, RequestError, one_line
from kvgraft.observability import NullRecorder, Recorder, RequestRecord, StepRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.config import EngineConfig
    from kvgraft.engine.request import Request, RequestOutput, StreamPart
    from kvgraft.engine.scheduler import Step
    from kvgraft.graft.model import SequenceOutput, SequenceRows

logger = logging.getLogger(__name__)

_LEAST_AUDIT_ROWS = 32
"""Rows of an audit's forward pass, however slow the machine."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """What a step did for one request: a part of its stream, or the error that ended it."""

    request_id: str
    part: StreamPart | None = None
    error: RequestError | None = None


class Engine:
    """A model, its K/V and its scheduler. Not thread-safe: one thread steps it.

    Attributes:
        config: Settings.
        loaded: The model as loaded.
        builder: Makes requests for this engine; safe on any thread.
        adapter: The model as kvgraft runs it.
        space: All K/V.
        manager: Takes requests through the cache.
        self_check: What was proved for the model.
        risk: At which notch grafts are served, and what may be said about them.
        auditor: Holds sampled requests against full prefill.
    """

    def __init__(
        self,
        model: str | LoadedModel,
        config: EngineConfig,
        *,
        recorder: Recorder | None = None,
        max_step_s: float = math.inf,
    ) -> None:
        """Load `model` and prove that its K/V may be reused.

        Args:
            model: Name, directory, hub id or a `LoadedModel`.
            config: Settings.
            recorder: Is told of every step and of every request that ends.
            max_step_s: Longest prefill of one step when no stream runs; others wait as long to be noticed.

        Raises:
            ConfigError: A setting or the model's name is wrong.
            ModelError: The model cannot be loaded or fails the self-check.
        """
        if 0 < config.num_slots < PROBE_SLOTS:
            raise ConfigError(
                f"num_slots must be at least {PROBE_SLOTS}, or 0 to choose by memory, not {config.num_slots}"
            )
        self.config = config
        self.loaded = (
            model if isinstance(model, LoadedModel) else load_model(model, dtype=config.dtype, device=config.device)
        )
        self.adapter, prefix = adapter_and_prefix(self.loaded.model, config)
        self.builder = RequestBuilder(self.loaded, config, self.adapter.pool.num_slots)
        self.adapter.lengths.require(self.builder.max_model_len)
        self.self_check: SelfCheckReport = self_check(self.adapter, np.arange(PROBE_SLOTS), self.builder.longest)
        self.risk = HeldRisk.configured(config, self.loaded, self.builder.policy)
        self.builder.policy = self.risk.policy
        self.manager = cache_manager(self.adapter, prefix, config, self.self_check.refusal, self.risk)
        self.space = self.manager.space
        self._pace = Pace(config.stream_slowdown, max_step_s, self.manager.flops.per_token)
        self.scheduler = Scheduler(self.manager, self._pace, max_running=config.max_running, max_rows=config.max_rows)
        self.auditor = Auditor(self.adapter, self.manager, self.risk)
        self._recorder: Recorder = recorder or NullRecorder()
        self._recorder_failed = False
        self._active: dict[str, ActiveRequest] = {}
        self.eos_token_ids = _eos_token_ids(self.loaded)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OverloadedError: As many requests wait as are allowed.
            ConfigError: An unfinished request has the same id.
        """
        if request.request_id in self._active:
            raise ConfigError(f"request id {request.request_id!r} is in use; choose another")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise OverloadedError(f"{self.config.max_waiting} requests are waiting already; try again later")
        active = ActiveRequest(
            request,
            OutputText(self.loaded.tokenizer, request.sampling.stop),
            Sampler(request.sampling, self.adapter.pool.device),
            flops=self.manager.flops,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.builder.longest,
            loss=self.risk.loss,
        )
        self.scheduler.add(active)
        self._active[request.request_id] = active

    def cancel(self, request_id: str) -> bool:
        """End a request at whatever stage; nothing of it is kept. False if it has ended already."""
        active = self._active.get(request_id)
        if active is None:
            return False
        self._drop(active, "abort")
        return True

    def reset(self) -> None:
        """Forget all prefixes and donors, on the device and on the host. For weights that were changed in place.

        Requests that run go on with the K/V that they have, and nothing of them is kept; those that wait start afresh.
        """
        self.space.reset()
        self.auditor.clear()
        if (
            self.risk.loss is not None
            and fingerprint(self.loaded.model, self.loaded.tokenizer) != self.loaded.fingerprint
        ):
            self.risk.withdraw("the weights have changed")

    def cancel_all(self) -> None:
        """End every request, as `cancel` does, and forget all audits."""
        self.auditor.clear()
        for request_id in list(self._active):
            self.cancel(request_id)

    def step(self) -> list[StepEvent]:
        """Run one forward pass for the requests that are due; a failure ends the request that it concerns, no other."""
        started = time.perf_counter()
        self._make_room()
        step = self.scheduler.schedule()
        events = [self._fail(active, error) for active, error in step.failed]
        outputs = self._forward([rows for _, rows in step.parts])
        for (active, _), output in zip(step.parts, outputs, strict=True):
            event = self._receive(active, output)
            if event is not None:
                events.append(event)
        seconds = time.perf_counter() - started
        self._pace.observe(seconds, step.num_streams, step.prefill_flops)
        self._record(lambda: self._recorder.record_step(self._step_record(step, seconds)))
        return events

    def audit_step(self) -> None:
        """Run one forward pass of an audit, no longer than a step of requests may take. For when `has_work` is false."""
        if self.auditor.has_work:
            affordable = self._pace.prefill_flops_alone / self.manager.flops.per_token
            self.auditor.step(max(_LEAST_AUDIT_ROWS, int(min(self.config.max_rows, affordable))))

    def _make_room(self) -> None:
        """Take its slots from an audit that pauses if unfinished requests may come to need them."""
        if not self.auditor.is_running:
            return
        held = (0 if active.kv is None else len(active.kv.kv_indices) for active in self._active.values())
        missing = sum(active.max_tokens for active in self._active.values()) - sum(held)
        if missing > self.space.available or self.manager.longest_piece is not None:
            self.auditor.interrupt()

    def _forward(self, batch: Sequence[SequenceRows]) -> Sequence[SequenceOutput | Exception]:
        if not batch:
            return []
        try:
            return self.adapter.forward(batch)
        except Exception as error:
            if len(batch) == 1:
                return [error]
            logger.exception("a batch of %d requests failed; each is tried alone", len(batch))
            # Rows may be computed twice: they write the same K/V into the same slots. Drift that was corrected the first time
            # is not measured again (graft/drift.py).
            return [self._forward([rows])[0] for rows in batch]

    def _receive(self, active: ActiveRequest, output: SequenceOutput | Exception) -> StepEvent | None:
        if isinstance(output, Exception):
            return self._fail(active, output)
        was_prefilling = active.is_prefilling
        try:
            part = active.receive(output)
        except Exception as error:  # noqa: BLE001 - one request must not stop the others
            return self._fail(active, error)
        if part is None:
            return None
        assert active.kv is not None
        if active.finish_reason is not None:
            part = replace(part, output=self._finish(active))
        elif was_prefilling:
            self.manager.publish(active.kv, active.known_token_ids)
        return StepEvent(active.request.request_id, part)

    def _finish(self, active: ActiveRequest) -> RequestOutput:
        assert active.kv is not None
        assert active.finish_reason is not None
        audit = active.audit()
        if audit is not None and active.kv.epoch == self.space.epoch:
            self.auditor.add(audit)
        self.manager.finish(active.kv, active.known_token_ids)
        self._forget(active, active.finish_reason)
        return active.output()

    def _fail(self, active: ActiveRequest, error: Exception) -> StepEvent:
        logger.error("request %s failed", active.request.request_id, exc_info=error)
        self._drop(active, "error")
        failure = RequestError(f"the engine failed on this request: {one_line(error)}")
        return StepEvent(active.request.request_id, error=failure)

    def _drop(self, active: ActiveRequest, outcome: str) -> None:
        if active.kv is not None:
            self.manager.abort(active.kv)
        self._forget(active, outcome)

    def _forget(self, active: ActiveRequest, outcome: str) -> None:
        del self._active[active.request.request_id]
        self.scheduler.remove(active)
        self._record(lambda: self._recorder.record_request(_request_record(active, outcome)))

    def _record(self, record: Callable[[], None]) -> None:
        """Tell the recorder, which is not ours: its failures harm nobody, and the first is logged."""
        try:
            record()
        except Exception:
            if not self._recorder_failed:
                logger.exception("a recorder failed; further failures of it are not logged")
            self._recorder_failed = True

    def _step_record(self, step: Step, seconds: float) -> StepRecord:
        usage = self.space.usage()
        return StepRecord(
            seconds=seconds,
            prefill_rows=step.prefill_rows,
            decode_rows=step.num_streams,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            slots_free=usage.free,
            slots_request=usage.request,
            slots_cached=usage.cached,
            slots_donor=usage.donor,
            num_donors=len(self.space.donors),
            donor_tokens=self.space.donors.num_tokens,
            host_bytes=self.space.host.used_bytes,
        )


def _request_record(active: ActiveRequest, outcome: str) -> RequestRecord:
    arrival = active.request.arrival
    return RequestRecord(
        request_id=active.request.request_id,
        outcome=outcome,
        prompt_tokens=len(active.request.token_ids),
        output_tokens=len(active.output_ids),
        report=active.report,
        queue_s=None if active.admitted_at is None else active.admitted_at - arrival,
        ttft_s=None if active.first_token_at is None else active.first_token_at - arrival,
        total_s=time.perf_counter() - arrival,
        num_preemptions=active.num_preemptions,
    )


def _eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    generation = loaded.model.generation_config
    configured = generation.eos_token_id if generation else None
    if configured is None and loaded.tokenizer is not None:
        configured = loaded.tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset(configured if isinstance(configured, list) else [configured])
