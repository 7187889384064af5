"""The engine: requests go in, a step at a time runs them, tokens come out. `LLM` and `AsyncLLM` stand on it."""

from __future__ import annotations

import logging
import math
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.config.stores import store_urls
from kvgraft.engine.assembly import adapter_and_prefix, cache_manager, donor_proposer
from kvgraft.engine.event_feed import EventFeed
from kvgraft.engine.idle.audit import Auditor
from kvgraft.engine.idle.healing import MOST_ROWS, IdleHealer
from kvgraft.engine.kv.build_context import eviction_parameters
from kvgraft.engine.kv.layer_rows import StateRow
from kvgraft.engine.kv.sessions import Sessions
from kvgraft.engine.model.loading import LoadedModel, eos_token_ids, fingerprint, load_model
from kvgraft.engine.model.self_check import PROBE_SLOTS, SelfCheckReport, probe_slots, self_check
from kvgraft.engine.requests.request_builder import RequestBuilder
from kvgraft.engine.requests.risk import HeldRisk
from kvgraft.engine.requests.text import OutputText
from kvgraft.engine.sampling.sampling import Sampler, rules_of
from kvgraft.engine.schedule.active import ActiveRequest
from kvgraft.engine.schedule.pace import Pace
from kvgraft.engine.schedule.recording import Recording
from kvgraft.engine.schedule.scheduler import Scheduler
from kvgraft.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    CorruptCacheError,
    OverloadedError,
    PolicyError,
    RequestError,
    UnservableError,
    is_out_of_memory,
    one_line,
)
from kvgraft.memory import Owner
from kvgraft.observability import NullRecorder
from kvgraft.observability.stages import stage
from kvgraft.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvgraft.config import EngineConfig
    from kvgraft.engine.kv.holdings import Holdings
    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.requests.request import Request, RequestOutput, StreamPart
    from kvgraft.engine.schedule.scheduler import ScheduledStep
    from kvgraft.engine.stores.store_tier import StoreTier
    from kvgraft.graft.model import SequenceOutput, SequenceRows
    from kvgraft.observability import Recorder

logger = logging.getLogger(__name__)

_LEAST_AUDIT_ROWS = 32
"""Rows of an audit's forward pass, however slow the machine."""


@dataclass(frozen=True, slots=True)
class StepEvent:
    """Result of a step for one request: a part of its stream, or the error that ended it."""

    request_id: str
    part: StreamPart | None = None
    error: RequestError | None = None


_HEAL_S = 0.05
"""Longest piece of healing while nothing else runs: as much is lost where a request arrives and the piece is abandoned."""
_IDLE_NEWS_S = 0.05
"""Time of the engine's thread for the news of stores, at once, while it has nothing else to do."""
_STORE_TICK_S = 2e-3
"""How long a step waits for a store if there is nothing else to do: new requests and cancellations wait as long."""


class Engine:
    """A model, its K/V and its scheduler. Not thread-safe: one thread steps it.

    Attributes:
        builder: Makes requests for this engine; safe on any thread.
        self_check: Proof that the model's K/V may be reused, or why not.
        risk: Notches at which grafts are served, and statements about them.
        proposer: Names donors that resemble a prompt, or None.
        stores: Stores of donors; None without any.
        is_broken: Whether it is about to begin anew, and has found no memory for that yet.
        num_lent: Callers that hold slots beside requests: probes.
        num_rebuilds: How often it began anew, since what was cached could not be trusted.
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
            recorder: Records every step and every request that ends.
            max_step_s: Longest prefill of one step when no stream runs; others wait as long to be noticed.

        Raises:
            ConfigError: A setting or the model's name is wrong.
            ImportError: `kv_events` is set and the extra `router` is not installed.
            IntegrationError: The endpoint of `kv_events` cannot be opened, or another package's prefix cache not be loaded.
            ModelError: The model cannot be loaded or fails the self-check.
        """
        if 0 < config.num_slots < PROBE_SLOTS:
            raise ConfigError(
                f"num_slots must be at least {PROBE_SLOTS}, or 0 to choose by memory, not {config.num_slots}"
            )
        if config.announce_donors and not config.kv_events:
            raise ConfigError(
                "announce_donors adds donors to the KV events; set kv_events, such as tcp://127.0.0.1:5557"
            )
        # Refused before a model is loaded.
        eviction_parameters(config)
        if store_urls(config.store):
            from kvgraft.memory.store.registry import require_stores  # loaded where it is asked for

            require_stores(config.store)
        if config.embedder != "none":
            from kvgraft.semantic.registry import require_embedder  # loaded where it is asked for

            require_embedder(config.embedder)
        self.config = config
        self._events = EventFeed(config.kv_events)
        self.stores: StoreTier | None = None
        try:
            self._assemble(model, max_step_s)
        except BaseException:
            self._close_stores()
            self._events.close()
            raise
        self._recording = Recording(recorder or NullRecorder(), self.space, self.scheduler, self.sessions)
        self._active: dict[str, ActiveRequest] = {}
        self.is_broken = False
        self.num_rebuilds = 0
        self.num_lent = 0
        self.eos_token_ids = eos_token_ids(self.loaded)

    def _assemble(self, model: str | LoadedModel, max_step_s: float) -> None:
        config = self.config
        stage("loading the model" if isinstance(model, LoadedModel) else f"loading {model}")
        self.loaded = (
            model if isinstance(model, LoadedModel) else load_model(model, dtype=config.dtype, device=config.device)
        )
        stage("reserving memory for K/V")
        self.adapter, prefix = adapter_and_prefix(self.loaded, config, self._events.log)
        self.builder = RequestBuilder(self.loaded, config, self.adapter.pool.num_slots)
        self.adapter.lengths.require(self.builder.max_model_len)
        stage("checking the model")
        slots = np.arange(probe_slots(self.adapter))
        self.self_check: SelfCheckReport = self_check(self.adapter, slots, self.builder.longest)
        self.risk = HeldRisk.configured(config, self.loaded, self.builder.policy)
        self.builder.policy = self.risk.policy
        self.proposer = donor_proposer(config, self.loaded.tokenizer)
        self.manager = cache_manager(
            self.adapter,
            prefix,
            config,
            self.loaded,
            refusal=self.self_check.refusal,
            risk=self.risk,
            proposer=self.proposer,
        )
        self.space = self.manager.space
        if self._events.log is not None:
            common = Namespace(self.loaded.fingerprint)
            self._events.log.common_key = common.key
            if config.announce_donors:
                from kvgraft.reuse.announcer import DonorAnnouncer  # loaded where it is asked for

                self.space.donors.watch(DonorAnnouncer(self._events.log.announce, common))
        self.sessions = Sessions(self.space, self.builder, max_sessions=config.max_sessions, ttl_s=config.session_ttl_s)
        self._pace = Pace(config.stream_slowdown, max_step_s, self.manager.flops.per_token)
        self.scheduler = Scheduler(self.manager, self._pace, max_running=config.max_running, max_rows=config.max_rows)
        self.auditor = Auditor(self.adapter, self.manager, self.risk)
        self.healer = IdleHealer(self.adapter, self.manager)
        if store_urls(config.store):
            from kvgraft.engine.store_space import open_store_tier  # loaded where it is asked for

            self.stores = open_store_tier(config, self.loaded, self.adapter, self.space, self.self_check.refusal)
        if self.stores is not None:
            self.stores.flops_per_s = lambda: self._pace.flops_per_s

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return self.scheduler.has_work or self.space.is_doubtful

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OverloadedError: As many requests wait as are allowed.
            ConfigError: An unfinished request has the same id, or its session cannot take it.
        """
        if request.request_id in self._active:
            raise ConfigError(f"request id {request.request_id!r} is in use; choose another")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise OverloadedError(f"{self.config.max_waiting} requests are waiting already; try again later")
        if self.space.is_doubtful and not self._active:
            self._settle()
        with self._doubting():
            request = self.sessions.begin(request)
            try:
                active = self._queued(request)
            except BaseException:
                self.sessions.cancel(request.request_id)
                raise
            self._active[request.request_id] = active

    def _queued(self, request: Request) -> ActiveRequest:
        sampling, device = request.sampling, self.adapter.pool.device
        structure = None if request.structure is None else request.structure.start()
        rules = rules_of(sampling, request.token_ids, self.eos_token_ids, device)
        active = ActiveRequest(
            request,
            OutputText.of(self.loaded.tokenizer, sampling),
            Sampler(sampling, device, structure, rules),
            flops=self.manager.flops,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.builder.longest,
            loss=self.risk.loss,
        )
        self.scheduler.add(active)
        return active

    def proposals(self) -> dict[str, int]:
        """Return counts of donors that an embedder named; empty without one."""
        if self.proposer is None:
            return {}
        found = self.manager.proposals
        return {"donors": found.donors, "tokens": found.tokens, **self.proposer.counts()}

    def cancel(self, request_id: str) -> bool:
        """End a request in any phase; nothing of it is kept. False if it has ended already."""
        active = self._active.get(request_id)
        if active is None:
            return False
        with self._doubting():
            self._drop(active, "abort")
        return True

    def reset(self) -> None:
        """Forget all prefixes, donors and sessions, on the device and on the host. For weights that were changed in place.

        What lies in stores is found again only if every element of the weights is what it was: their digest, taken anew,
        names the part of a store that is used.

        Requests that run go on with the K/V that they have, and nothing of them is kept; those that wait start afresh.
        """
        try:
            self._forget_all()
        except BaseException:
            self.is_broken = True  # nothing of before may live on: the next step ends all requests and begins anew
            self.space.distrust()
            if self._active:
                raise
            logger.exception("what is cached cannot be read; the engine begins anew with nothing cached")
            self.rebuild()
        if self.stores is not None:
            from kvgraft.engine.store_space import space_of  # loaded with the stores

            self.stores.leave()  # first: if the digest fails, nothing of these weights may get to where others' K/V lie
            self.stores.enter(space_of(self.loaded, self.adapter))
        if (
            self.risk.loss is not None
            and fingerprint(self.loaded.model, self.loaded.tokenizer) != self.loaded.fingerprint
        ):
            self.risk.withdraw("the weights have changed")

    def _forget_all(self) -> None:
        self.scheduler.restart_loading()
        self.sessions.reset()
        self.manager.reset()
        self._events.flush()
        self.auditor.clear()
        self.healer.clear()

    def flush_events(self) -> None:
        """Publish what the prefix cache has stored and removed outside of steps."""
        self._events.flush()

    def close(self) -> None:
        """Publish the last events; release a provider's resources, threads, stores and the endpoint of events."""
        try:
            self.manager.close()
            if self.proposer is not None:
                self.proposer.discovery.close()
            self._close_stores()
        finally:
            self._events.close()

    def _close_stores(self) -> None:
        if self.stores is not None:
            self.stores.close()

    def poll_stores(self) -> None:
        """Take in what stores have found and written meanwhile; `step` does so itself."""
        if self.stores is not None:
            with self._idle_work("news of stores"):
                self.stores.step(_IDLE_NEWS_S)
            self._events.flush()

    def cancel_all(self) -> None:
        """End every request, as `cancel` does, and forget all audits and what was to be healed."""
        self.auditor.clear()
        self.healer.clear()
        for request_id in list(self._active):
            self.cancel(request_id)

    def step(self) -> list[StepEvent]:
        """Run one forward pass for the requests that are due; a failure ends the request that it concerns, no other.

        Where it is unknown which request a failure concerns, all end. What an interrupted change may have left half done is
        verified before it is read again; if it does not hold, the engine begins anew with nothing cached.
        """
        unfinished: list[str] = []
        try:
            unfinished += self._active
            self._require_sound()
            events = self._step()
            self._require_sound()
        except Exception as error:
            logger.exception("a step failed; all requests end")
            return self.end_all(error, unfinished)
        except BaseException as error:  # its user's Ctrl-C
            self.space.doubt(error)
            raise
        return events

    def doubt(self, error: BaseException) -> None:
        """Note that something outside of a step failed, such as a command: what it changed is verified by the next one."""
        self.space.doubt(error)

    @contextmanager
    def _doubting(self) -> Iterator[None]:
        """Have what a failed change has left verified by the next step."""
        try:
            yield
        except BaseException as error:
            self.space.doubt(error)
            raise

    def _settle(self) -> None:
        """Verify the books while there is no request, and begin anew if they do not hold."""
        try:
            self._require_sound()
        except Exception as error:  # noqa: BLE001 - it is logged there
            self.end_all(error)

    def _require_sound(self) -> None:
        """Verify the books if an error may have interrupted a change of them; raises what `check` raises."""
        if self.space.is_doubtful:
            self._verify()

    def _verify(self) -> None:
        self.check()
        if not self.space.retry_unlocks(self._locks_held()):
            self.check()
        self.space.trust()

    def end_all(self, error: Exception, unanswered: Sequence[str] = ()) -> list[StepEvent]:
        """End all requests, and see to it that what is left of them is sound: a failure may concern any of them.

        Args:
            error: What has failed.
            unanswered: Ids of requests that may have ended meanwhile, without an event.

        Returns:
            An error for each.
        """
        self.space.distrust()
        names = dict.fromkeys([*unanswered, *self._active])
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else one_line(error)
        failure = RequestError(f"the engine failed while it served this request: {reason}; send it again")
        ended = [StepEvent(name, error=failure) for name in names]
        try:
            self._give_all_back()
            self._verify()
        except Exception:
            logger.exception("what is cached is not sound; the engine begins anew with nothing cached")
            self._try_to_rebuild()
        return ended

    def _give_all_back(self) -> None:
        """Take back what requests, a piece that heals and an audit hold; all of them end."""
        self.healer.abandon()
        self.auditor.interrupt()
        for active in list(self._active.values()):
            self._drop(active, "error")

    def _try_to_rebuild(self) -> None:
        """Begin anew; where there is no memory even for that, or slots are lent to a caller, the next step tries again."""
        try:
            self.rebuild()
        except Exception:
            self.is_broken = True
            self.space.distrust()
            logger.exception("the engine cannot begin anew yet")

    def rebuild(self) -> None:
        """Begin anew with every container empty and without a request: they have been answered.

        For books that cannot be trusted, which `reset` would read. What stores hold is found again.

        Raises:
            CorruptCacheError: A caller holds slots, and would write into what is given to others; the probe is to be closed.
        """
        if self.num_lent:
            raise CorruptCacheError("a caller holds slots of this engine; close the probe")
        self.is_broken = True
        self.auditor.rebuild()
        self.healer.rebuild()
        for active in self._active.values():
            if active.kv is not None and active.kv.held.reads is not None:
                active.kv.held.reads.cancel()
        self._active.clear()
        self.scheduler.rebuild()
        self.sessions.rebuild()
        self.manager.rebuild()
        if self.stores is not None:
            self.stores.rebuild()
        self._events.flush()
        self.num_rebuilds += 1
        self.is_broken = False
        self.space.trust()

    def _step(self) -> list[StepEvent]:
        """Run one forward pass for the requests that are due."""
        started = time.perf_counter()
        self.sessions.expire()
        self._make_room()
        if self.stores is not None:
            with self._idle_work("news of stores"):
                self.stores.step()
        step = self.scheduler.schedule()
        self._require_sound()  # before anything is computed into slots that may be others'
        if not (step.parts or step.failed):
            self.scheduler.wait_for_stores(_STORE_TICK_S)
        events = [self._fail(active, error) for active, error in step.failed]
        beside = self._heal_beside(step)
        try:
            outputs = self._forward([*(rows for _, rows in step.parts), *beside])
        except BaseException:  # its user's Ctrl-C
            self.healer.abandon()
            raise
        for output in outputs[len(step.parts) :]:
            self.healer.receive(output)
        for (active, _), output in zip(step.parts, outputs, strict=False):
            events += self._receive(active, output)
        seconds = time.perf_counter() - started
        healed_flops = sum(self.manager.flops.of_positions(rows.positions) for rows in beside)
        self._pace.observe(seconds, step.num_streams, step.prefill_flops + healed_flops, step.admission_s)
        self._events.flush()
        self._recording.step(step, started, seconds, sum(len(rows.positions) for rows in beside))
        return events

    def check(self) -> None:
        """Verify every invariant of the K/V bookkeeping and of sessions. Between steps.

        Raises:
            CorruptCacheError: One does not hold. The next step ends all requests and begins anew with nothing cached.
        """
        try:
            self._check()
        except Exception:
            self.space.distrust()
            raise

    def _check(self) -> None:
        if self.is_broken:
            raise CorruptCacheError("the engine could not begin anew yet; it tries again with the next step")
        self.space.check()
        self.sessions.check()
        self.healer.check()
        self.scheduler.check(self._active.values())
        held, references = self._num_held(), self.space.allocator.num_references(Owner.REQUEST)
        is_lent = self.auditor.is_running or self.num_lent > 0
        if references < held or (references > held and not is_lent):
            raise CorruptCacheError(
                f"unfinished requests hold {held} slots, of which the allocator counts {references}"
            )
        if not is_lent:
            self.space.check_held(self._locks_held(), sum(len(each.pinned) for each in self._holdings()))
        states = self.space.state_usage()
        if states is not None and states.request != self._num_states_held() and not self.num_lent:
            raise CorruptCacheError(
                f"unfinished requests hold {self._num_states_held()} states, of which the allocator counts {states.request}"
            )

    def _holdings(self) -> list[Holdings]:
        return [active.kv.held for active in self._active.values() if active.kv is not None]

    def _locks_held(self) -> list[PrefixLock]:
        return [lock for each in self._holdings() for lock in each.locks]

    def audit_step(self) -> None:
        """Run one forward pass of an audit, no longer than a step of requests may take. For when `has_work` is false."""
        with self._idle_work("an audit"):
            if not self.auditor.has_work:
                return
            started = time.perf_counter()
            affordable = self._pace.prefill_flops_alone / self.manager.flops.per_token
            self.auditor.step(max(_LEAST_AUDIT_ROWS, int(min(self.config.max_rows, affordable))))
            self._events.flush()
            self._recording.idle("audit", started, time.perf_counter() - started)

    @contextmanager
    def _idle_work(self, what: str) -> Iterator[None]:
        """Let work that no request waits for fail alone; what it changed is verified by the next step."""
        try:
            yield
        except Exception:
            self.space.distrust()
            logger.exception("%s failed", what)

    def _make_room(self) -> None:
        """Take its slots from an audit that pauses if unfinished requests may come to need them."""
        if self.auditor.is_running and (self._unclaimed() < 0 or self.manager.longest_piece is not None):
            self.auditor.interrupt()

    def _unclaimed(self) -> int:
        """Slots that unfinished requests will not come to need; below 0 if they may need more than there are."""
        return self.space.available - (sum(active.max_tokens for active in self._active.values()) - self._num_held())

    def _num_held(self) -> int:
        """Slots of unfinished requests, one that two of them hold twice."""
        return sum(0 if active.kv is None else len(active.kv.kv_indices) for active in self._active.values())

    def _num_states_held(self) -> int:
        """States of unfinished requests, running and recorded ones."""
        rows = (active.kv.held.layers for active in self._active.values() if active.kv is not None)
        return sum(len(list(row.held)) for row in rows if isinstance(row, StateRow))

    def heal_step(self, is_wanted: Callable[[], bool] | None = None) -> bool:
        """Heal a piece of a finished request; False if none was healed now, for want of one or because `is_wanted` said so.

        `is_wanted` is asked at every layer whether a request waits to be taken in: the piece is abandoned then.

        For when `has_work` is false; between steps it takes no slots that unfinished requests may come to need.
        """
        started, flops = time.perf_counter(), 0.0
        with self._idle_work("healing"):
            if not self.healer.has_work:
                return False
            flops = self.healer.step(
                min(self.config.max_rows, MOST_ROWS),
                self._pace.idle_flops(_HEAL_S),
                self._unclaimed(),
                is_alone=not self._active,
                is_wanted=is_wanted,
            )
            if flops:
                seconds = time.perf_counter() - started
                self._pace.observe(seconds, 0, flops)
                self._recording.idle("heal", started, seconds)
            self._events.flush()
        return flops > 0

    def _heal_beside(self, step: ScheduledStep) -> list[SequenceRows]:
        """Rows of a piece to heal in the pass of `step`, in what its streams would bear and no prompt wants; one or none."""
        room = self.config.max_rows - len(step.parts)
        if self.config.heal != "always" or not step.spare_flops or not self.healer.has_work or room <= 0:
            return []
        rows = self.healer.begin(room, step.spare_flops, self._unclaimed(), is_alone=False)
        return [] if rows is None else [rows]

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

    def _receive(self, active: ActiveRequest, output: SequenceOutput | Exception) -> list[StepEvent]:
        if isinstance(output, PolicyError):
            active.give_up(output)
            return []
        if isinstance(output, Exception):
            return [self._fail(active, output)]
        was_settled = active.is_settled
        try:
            parts = active.receive(output)
        except Exception as error:  # noqa: BLE001 - one request must not stop the others
            return [self._fail(active, error)]
        assert active.kv is not None
        if active.finish_reason is not None:
            parts[-1] = replace(parts[-1], output=self._finish(active))
        elif active.is_settled and not was_settled:
            self.manager.publish(active.kv, active.known_token_ids)
        return [StepEvent(active.request.request_id, part) for part in parts]

    def _finish(self, active: ActiveRequest) -> RequestOutput:
        assert active.kv is not None
        assert active.finish_reason is not None
        audit = active.audit()
        if audit is not None and active.kv.epoch == self.space.epoch:
            self.auditor.add(audit)
        name, token_ids = active.request.request_id, active.known_token_ids
        self.manager.finish(
            active.kv, token_ids, keep_as=self.sessions.keeps(name), is_settled=not active.is_unrepaired
        )
        if self._may_heal(active.kv):
            self.healer.add(active.request, active.kv.namespace, token_ids, active.kv.made)
        self.sessions.end(name, active.all_token_ids)
        self._forget(active, active.finish_reason)
        return active.output()

    def _may_heal(self, kv: RequestKV) -> bool:
        """Return whether a finished request left approximate K/V of its own text and the present weights."""
        is_current = kv.epoch == self.space.epoch
        return (
            self.config.heal != "off" and kv.lineage.is_approximate and kv.decision.substitution is None and is_current
        )

    def _fail(self, active: ActiveRequest, error: Exception) -> StepEvent:
        if isinstance(error, UnservableError):
            self._drop(active, "refused")
            return StepEvent(active.request.request_id, error=error)
        self._drop(active, "error")
        logger.error("request %s failed", active.request.request_id, exc_info=error)
        reason = OUT_OF_MEMORY if is_out_of_memory(error) else one_line(error)
        failure = RequestError(f"the engine failed on this request: {reason}")
        return StepEvent(active.request.request_id, error=failure)

    def _drop(self, active: ActiveRequest, outcome: str) -> None:
        if active.kv is not None:
            self.manager.abort(active.kv)
        self.sessions.cancel(active.request.request_id)
        self._forget(active, outcome)

    def _forget(self, active: ActiveRequest, outcome: str) -> None:
        del self._active[active.request.request_id]
        self.scheduler.remove(active)
        self.healer.wake()
        self._recording.request(active, outcome)
