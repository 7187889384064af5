"""The half of the connector that runs beside a model: captures, grafts, and reports of both."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group

from kvgraft.errors import IntegrationError
from kvgraft.graft.drift import drift_correction
from kvgraft.graft.select import Observable
from kvgraft.integrations.vllm.messages import NOTHING_OF_STORES, StoreReport
from kvgraft.integrations.vllm.refusals import refused_engine
from kvgraft.integrations.vllm.runner import takes_running_back
from kvgraft.integrations.vllm.selection import chosen_policy, fallback_policy
from kvgraft.integrations.vllm.worker.donor_store import DonorStore
from kvgraft.integrations.vllm.worker.graft_job import GraftJob
from kvgraft.integrations.vllm.worker.group_kv import PagedKV
from kvgraft.integrations.vllm.worker.layers import layer_groups
from kvgraft.integrations.vllm.worker.model_handle import ModelHandle
from kvgraft.integrations.vllm.worker.no_stores import NoGraftReads, NoRankStores
from kvgraft.integrations.vllm.worker.outbox import Outbox, RankState
from kvgraft.integrations.vllm.worker.query_look import refused_look
from kvgraft.integrations.vllm.worker.ranks import together
from kvgraft.integrations.vllm.worker.self_check import checked
from kvgraft.integrations.vllm.worker.sparse_pass import RankModel
from kvgraft.integrations.vllm.worker.weights_witness import WeightsWitness
from kvgraft.memory import HostKVStore
from kvgraft.memory.configured import configured_stores
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.outcome import GraftOutcome
from kvgraft.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.integrations.vllm.messages import (
        BlockIds,
        Capture,
        Graft,
        GraftRepair,
        StepCommands,
        TextId,
        WorkerReport,
        Write,
    )
    from kvgraft.integrations.vllm.worker.graft_reads import GraftReads
    from kvgraft.integrations.vllm.worker.layers import LayerGroup
    from kvgraft.integrations.vllm.worker.stores import RankStores
    from kvgraft.memory.page_lock import CudaPages
    from kvgraft.types import DonorId

logger = logging.getLogger(__name__)

_LEAST_QUEUE_BYTES = 64 << 20
"""K/V that may be under way to stores, or from them, for any `host_bytes`; more if a quarter of these is more."""


class GraftWorker:
    """Carries the scheduler's commands out, in the order in which they come. Not thread-safe.

    The next report names what fails; it costs a request nothing but time. Nothing is captured or grafted before the
    self-check has passed, which runs after the first forward pass.

    Attributes:
        outbox: What vLLM and the scheduler's half have not taken yet.
    """

    def __init__(
        self,
        config: VLLMConfig,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        *,
        may_fall_back: bool = False,
    ) -> None:
        """Take vLLM's configuration; on a model whose attention cannot be formed here `first_k` may replace the policy."""
        self._config = config
        self._may_fall_back = may_fall_back
        self._fallback = ""
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._policy = chosen_policy(config)
        self._correction = drift_correction(config.correction)
        self._donors = DonorStore(HostKVStore(config.host_bytes, pages=_pages()))
        self._stores, self._reads = _stores(config, self._donors)
        self._groups: tuple[LayerGroup, ...] = ()
        self._handle: ModelHandle | None = None
        self._rank: RankModel | None = None
        self._refusal = ""
        self._jobs: dict[str, GraftJob] = {}
        self._unrepaired: dict[str, GraftJob] = {}
        self._is_report_due = False
        self.outbox = Outbox()
        self._dead_texts: set[TextId] = set()
        self._is_proved_anew = self._is_unproved = self._are_changed = False
        self._witness: WeightsWitness | None = None
        self._num_changes = 0

    @property
    def refusal(self) -> str:
        """Reason why this rank captures and grafts nothing, or empty."""
        return self._refusal

    @property
    def description(self) -> dict[str, object]:
        """Findings of the self-check, for `kvgraft doctor`; of an engine that was refused before it the reason alone."""
        from kvgraft.integrations.vllm.worker.description import description_of  # loaded where it is asked for

        return description_of(self._groups, self._rank, selection=self._fallback, refusal=self._refusal)

    def register(self, kv_caches: Mapping[str, Tensor]) -> None:
        """Take the paged caches and prove their layout, unless the scheduler's half has refused the engine for its reason."""
        self._refusal = refused_engine(self._config, self._vllm_config, self._kv_cache_config)
        if self._refusal:
            return
        try:
            self._groups = together(lambda: layer_groups(self._vllm_config, self._kv_cache_config, kv_caches))
        except Exception as error:  # noqa: BLE001 - after any failure nothing may be grafted
            self._refuse(error)
            return
        if any(group.window for group in self._groups):
            # Loaded here, so that no graft waits for it.
            from kvgraft.integrations.vllm.worker import window_ring  # noqa: F401
        self._handle = ModelHandle(self._groups[0].layers[0].module)

    def load(self, commands: StepCommands) -> None:
        """Begin new grafts and go on with those under way, within the step's budget.

        Where that fails half-way, everything is given up, by all ranks alike: what is missing of a text, say, is not known.
        """
        try:
            if self._jobs or commands.are_for_all_ranks:
                together(partial(self._load, commands))
            else:
                self._load(commands)
        except Exception as error:
            logger.exception("the commands of a step failed half-way; all donors are forgotten")
            self._give_up(commands, _failed(error))

    def _load(self, commands: StepCommands) -> None:
        self._prepare()
        self._is_report_due = commands.is_report_due
        self._donors.settle()
        if commands.reset:
            self._forget_everything("the caches were reset")
            self._weights_differ()  # weights loaded since are those that run from now on
            self._prove_weights()
        if commands.grafts or commands.seals or commands.captures or commands.repairs or self._jobs:
            self._look_at_weights()  # a graft that takes several steps may have begun under other weights
        for request_id in commands.cancels:
            self._cancel(request_id)
        for seal in commands.seals:
            self._seal(seal.text_id, seal.donor_id)
        for command in commands.grafts:
            self._begin(command)
        for text_id in commands.discards:
            self._donors.discard(text_id)
            self._dead_texts.discard(text_id)
            for job in self._jobs.values():
                job.discard(text_id)
        for donor_id in commands.drops:
            self._donors.drop(donor_id)
            self._reads.drop(donor_id)
        self._take_arrivals(is_idle=commands.is_idle)
        # Repairs first, which no step can put off: grafts that wait take what they leave of the step.
        rows = self._config.rows_together(self._vllm_config.scheduler_config.max_num_batched_tokens)
        self._work(rows - sum(map(self._repair, commands.repairs)))

    def _give_up(self, commands: StepCommands, outcome: GraftOutcome) -> None:
        """Forget everything, and let vLLM compute what a step was to graft and to repair and has not."""
        self._stores.forget_space()  # until the weights are looked at: they may be others, and that be half noticed
        self._is_unproved = True
        self.outbox.num_failed_copies += 1
        for repair in commands.repairs:
            if repair.request_id not in self.outbox.repairs:
                self._leave_unrepaired(repair, outcome)
        self.outbox.lost_donors |= self._donors.donor_ids
        self.outbox.lost_donors.update(seal.donor_id for seal in commands.seals)
        self.outbox.lost_texts |= self._donors.text_ids
        self._forget_everything("a step failed half-way", outcome)
        for command in commands.grafts:
            if command.request_id not in self.outbox.outcomes:
                self._fail(command, outcome)

    def _cancel(self, request_id: str) -> None:
        self._reads.give_up(request_id)
        self._unrepaired.pop(request_id, None)
        if request_id in self._jobs:
            self.outbox.loaded.add(request_id)  # vLLM frees the blocks of a request that ended once its load has
            del self._jobs[request_id]

    def save(self, commands: StepCommands) -> None:
        """Capture K/V that the step's forward pass has computed; where that fails half-way, their texts are lost."""
        try:
            self._save(commands)
        except Exception:
            logger.exception("the text of a step is not captured")
            self.outbox.num_failed_copies += 1
            for capture in commands.captures:
                if capture.donor_id is None or capture.donor_id not in self._donors:
                    self._lose(capture.text_id)
                if capture.donor_id is not None and capture.donor_id not in self._donors:
                    self.outbox.lost_donors.add(capture.donor_id)

    def _save(self, commands: StepCommands) -> None:
        self._prepare()
        is_outdated = commands.known_changes < self._num_changes
        for capture in commands.captures:
            if self._rank is None or is_outdated:
                self._lose(capture.text_id)
            elif capture.text_id not in self._dead_texts:
                self._capture(self._rank, capture)
            if capture.donor_id is not None:
                self._seal(capture.text_id, capture.donor_id)
        for write in commands.writes:
            self._write(write)

    def take_report(self) -> WorkerReport | None:
        """Return the events since the last call; None if there is nothing to report. Nothing is taken where it fails."""
        try:
            return self._take_report()
        except Exception:
            logger.exception("the report of a step cannot be written; it is written once more")
            return self._take_report()

    def _take_report(self) -> WorkerReport | None:
        state = RankState(self._refusal, self._rank is not None, self._donors.used_bytes, self._num_changes)
        stored = self._take_store_report()
        self.outbox.lose(self._donors.take_lost())
        return self.outbox.take_report(state, stored, fallback=self._fallback, is_due=self._is_report_due)

    def _take_store_report(self) -> StoreReport:
        if isinstance(self._stores, NoRankStores) or isinstance(self._reads, NoGraftReads):
            return NOTHING_OF_STORES
        is_new, self._is_proved_anew = self._is_proved_anew, False
        promoted, unpromoted, unreadable = self._reads.take_news()
        return StoreReport(
            {get_tp_group().rank_in_group: self._stores.space} if is_new else {},
            self._stores.take_cost(),
            promoted,
            unpromoted,
            unreadable,
            self._stores.take_counts(),
        )

    def close(self) -> None:
        """Stop waiting for the model, and let stores finish what they write."""
        self._reads.close()
        self._donors.close()
        self._stores.close()
        if self._handle is not None:
            self._handle.close()

    def _prepare(self) -> None:
        """Run the self-check as soon as the model is known; all ranks see their first forward pass in the same step."""
        if self._rank is not None or self._refusal or self._handle is None or self._handle.model is None:
            return
        try:
            self._fall_back()
            rank = RankModel(self._vllm_config, self._handle.model, self._groups)
            observes, corrects = self._policy.observes, self._correction is not None
            self._rank, self._witness = together(
                lambda: (checked(rank, observes, corrects=corrects), WeightsWitness(rank.model))
            )
        except Exception as error:  # noqa: BLE001 - after any failure nothing may be grafted
            self._refuse(error)
            return
        self._prove_weights()

    def _fall_back(self) -> None:
        """Choose without a look where a layer's attention cannot be formed, unless the settings name it; all ranks alike."""
        if Observable.QUERY_ATTENTION not in self._policy.observes or not self._may_fall_back:
            return
        reason = refused_look(layer.module for group in self._groups for layer in group.layers)
        if reason:
            self._policy = fallback_policy(self._config)
            self._fallback = self._policy.name
            logger.warning(
                "%s chooses what is computed again, not %s: %s", self._fallback, self._config.selection, reason
            )

    def _prove_weights(self) -> None:
        """Name the space in stores of the present weights; without a name nothing is stored or read."""
        rank, stores = self._rank, self._stores
        if isinstance(stores, NoRankStores) or rank is None:
            return
        self._is_unproved = False
        try:
            together(lambda: stores.prove(rank))
            self._is_proved_anew = True
        except Exception:
            logger.exception("donors are neither stored nor read from stores")
            stores.forget_space()

    def _look_at_weights(self) -> None:
        """Forget what the model computed before its weights were changed in place; all ranks notice together."""
        if self._rank is None:
            return
        self._are_changed |= self._weights_differ()
        are_known, are_proved = together.meet("weights", int(not self._are_changed), int(not self._is_unproved))
        if not are_known:
            self._num_changes += 1
            self._are_changed = False
            self._forget_everything("the model's weights were changed in place")
        if not (are_known and are_proved):
            self._prove_weights()

    def _weights_differ(self) -> bool:
        try:
            return self._witness is not None and self._witness.has_changed()
        except Exception:
            logger.exception("weights cannot be looked at; they count as changed")
            return True

    def _forget_everything(self, reason: str, outcome: GraftOutcome | None = None) -> None:
        """Drop donors and texts, refuse later captures of these texts, and let vLLM compute the grafts under way."""
        logger.warning("all donors are forgotten: %s", reason)
        for job in list(self._jobs.values()):
            self._fail(job.command, outcome or replace(_not_made(reason), is_gone=True))
            del self._jobs[job.command.request_id]
        self._unrepaired.clear()
        self._reads.clear()
        self._dead_texts |= self._donors.text_ids
        self._donors.clear()

    def _refuse(self, error: Exception) -> None:
        self._refusal = f"{error}" if isinstance(error, IntegrationError) else f"{type(error).__name__}: {error}"
        logger.error(
            "kvgraft reuses nothing on this server: %s", self._refusal, exc_info=not isinstance(error, IntegrationError)
        )

    def _begin(self, command: Graft) -> None:
        self._reads.begin(command)
        if self._rank is None or command.void:
            reason = command.void or "the self-check has not passed"
            self._fail(command, replace(_not_made(reason), is_gone=command.is_gone))
            return
        try:
            rows, rank = self._config.max_recompute_tokens_per_step, self._rank
            job = together(
                lambda: GraftJob(
                    command,
                    rank,
                    self._donors,
                    self._policy,
                    correction=self._correction,
                    max_rows=rows,
                    below_margin=self._config.repair_below_margin,
                )
            )
            together(job.begin)
        except Exception as error:
            logger.exception("graft of request %s failed; vLLM computes it", command.request_id)
            self._fail(command, _failed(error))
            return
        self._jobs[command.request_id] = job
        if job.computes_everything:
            self._reads.give_up(command.request_id)

    def _take_arrivals(self, *, is_idle: bool) -> None:
        """Hand K/V that stores gave to their grafts; all ranks together. A store that fails costs the graft."""
        if is_idle:
            self._reads.wait()
        arrived, failed = self._reads.poll()
        for request_id, reason in failed.items():
            job = self._jobs.get(request_id)
            if job is not None:
                logger.warning("graft of request %s: %s; vLLM computes it", request_id, reason)
                self._fail(job.command, _not_made(reason, is_store_miss=True))
                del self._jobs[request_id]
        for request_id, parts in arrived.items():
            job = self._jobs.get(request_id)
            if job is not None and job.outcome is None:
                self._guarded(job, partial(job.arrive, parts))

    def _work(self, budget: int) -> None:
        """Synchronous grafts to their end, then asynchronous ones with what is left of `budget` rows, oldest first."""
        jobs = sorted(self._jobs.values(), key=lambda job: job.command.asynchronous)
        for job in jobs:
            is_asynchronous = job.command.asynchronous
            while job.outcome is None and (budget > 0 or not is_asynchronous):
                limit = budget if is_asynchronous else self._config.max_recompute_tokens_per_step
                budget -= self._guarded(job, partial(job.step, limit))
                if job.is_blocked:
                    break
            if job.outcome is not None:
                self._end(job, job.outcome)

    def _guarded(self, job: GraftJob, work: Callable[[], int | None]) -> int:
        """Do work for a graft on every rank; if it fails on one, the graft has failed on all."""
        try:
            with torch.inference_mode():
                return together(work) or 0
        except Exception as error:
            logger.exception("graft of request %s failed; vLLM computes it", job.command.request_id)
            job.outcome = _failed(error)
            return 0

    def _end(self, job: GraftJob, outcome: GraftOutcome) -> None:
        request_id = job.command.request_id
        if outcome.failed:
            self._fail(job.command, outcome)
        else:
            told = replace(outcome, read_ms=self._reads.take_waited_ms(request_id))
            if job.waits_for_repair:
                self._unrepaired[request_id] = job
            if job.command.asynchronous:
                self.outbox.loaded.add(request_id)
            self.outbox.outcomes[request_id] = told
        del self._jobs[request_id]

    def _repair(self, command: GraftRepair) -> int:
        """Compute what a policy chooses of a graft, to its end; if that fails, everything, and if that fails, vLLM does.

        Where vLLM cannot, the graft stays as it was, or closer to a full prefill. Returns how many rows were computed.
        """
        job = self._unrepaired.get(command.request_id)
        if job is None:
            gone = _not_made("what was grafted is of caches or weights that are gone")
            self.outbox.repairs[command.request_id] = replace(gone, is_gone=True)
            return 0
        num_rows, outcome = self._run(job, partial(job.repair, command.block_ids))
        if outcome.failed:
            more_rows, outcome = self._run(job, partial(job.compute_everything, outcome.fell_back))
            num_rows += more_rows
        if outcome.failed:
            self._leave_unrepaired(command, outcome)
        else:
            self.outbox.repairs[command.request_id] = outcome
            del self._unrepaired[command.request_id]
        return num_rows

    def _leave_unrepaired(self, command: GraftRepair, outcome: GraftOutcome) -> None:
        """Have vLLM compute what could not be repaired; where it cannot, it stays as it was, or closer to a full prefill."""
        job = self._unrepaired.get(command.request_id)
        if job is not None and job.command.tail is not None:
            self._lose(job.command.tail)
        if job is not None and takes_running_back(self._vllm_config):
            self._hand_back(command.block_ids, job.command.plan.spans[0].target_start)
            outcome = replace(outcome, failed=False)
        self.outbox.repairs[command.request_id] = outcome
        self._unrepaired.pop(command.request_id, None)

    def _run(self, job: GraftJob, begin: Callable[[], None]) -> tuple[int, GraftOutcome]:
        """Do the work of a graft from `begin` to its end, in pieces, in this step; returns its rows as well."""
        num_rows = self._guarded(job, begin)
        while job.outcome is None:
            num_rows += self._guarded(job, partial(job.step, self._config.max_recompute_tokens_per_step))
        return num_rows, job.outcome

    def _fail(self, command: Graft, outcome: GraftOutcome) -> None:
        """Let vLLM compute the positions: by blocks where their numbers identify the request, by request otherwise."""
        self._reads.give_up(command.request_id)
        self._unrepaired.pop(command.request_id, None)
        self.outbox.outcomes[command.request_id] = outcome
        for text_id in (*(text_id for text_id, _, _ in command.captures), command.tail):
            if text_id is not None:
                self._lose(text_id)
        if len(command.block_ids) == 1:
            self._hand_back(command.block_ids, command.plan.prefix_len)
        elif command.asynchronous:
            self.outbox.failed.add(command.request_id)
        else:
            raise IntegrationError(
                f"graft of request {command.request_id} failed and vLLM cannot take it back: {outcome.fell_back}"
            )
        if command.asynchronous:
            self.outbox.loaded.add(command.request_id)

    def _hand_back(self, block_ids: BlockIds, start: int) -> None:
        """Have vLLM compute what lies in a request's blocks from position `start` on."""
        size = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        self.outbox.failed_blocks.update(block_ids[0][start // size :])

    def _seal(self, text_id: TextId, donor_id: DonorId) -> None:
        try:
            self._donors.seal(text_id, donor_id)
        except Exception as error:  # noqa: BLE001 - a donor less is no reason to end the engine
            if text_id not in self._dead_texts:
                logger.warning("a donor is not kept: %s: %s", type(error).__name__, error)
                self.outbox.num_failed_copies += 1
            self.outbox.lost_donors.add(donor_id)
            self._dead_texts.discard(text_id)

    def _lose(self, text_id: TextId) -> None:
        """Forget a text and refuse its captures until the scheduler has heard of it."""
        self.outbox.lost_texts.add(text_id)
        self._dead_texts.add(text_id)
        self._donors.discard(text_id)

    def _capture(self, rank: RankModel, capture: Capture) -> None:
        try:
            homes = [
                PagedKV.of(group, np.asarray(block_ids, np.int32), start=0)
                for group, block_ids in zip(rank.groups, capture.block_ids, strict=True)
            ]
            self._donors.capture(capture.text_id, homes, np.arange(capture.start, capture.stop))
        except Exception:
            logger.exception("capture of computed text failed; it becomes no donor")
            self.outbox.num_failed_copies += 1
            self._lose(capture.text_id)

    def _write(self, write: Write) -> None:
        try:
            read = self._donors.later(write.donor_id)
            if read is not None:
                self._stores.write(write.record, read)
        except Exception:
            logger.exception("a donor cannot be written; it is not stored")
            self.outbox.num_failed_copies += 1


def _stores(config: VLLMConfig, donors: DonorStore) -> tuple[RankStores | NoRankStores, GraftReads | NoGraftReads]:
    """Return the stores of the rank, and reads from them; nothing of either is imported where there are none."""
    opened = configured_stores(config.store)
    if not opened:
        return NoRankStores(), NoGraftReads()
    from kvgraft.integrations.vllm.worker.graft_reads import GraftReads
    from kvgraft.integrations.vllm.worker.stores import RankStores

    stores = RankStores(opened, max_queued_bytes=_under_way(config))
    return stores, GraftReads(stores, donors)


def _not_made(reason: str, *, is_store_miss: bool = False) -> GraftOutcome:
    return GraftOutcome((), 0.0, 0.0, reason, failed=True, is_store_miss=is_store_miss)


def _failed(error: Exception) -> GraftOutcome:
    """Return the outcome of a graft that raised."""
    miss = miss_of(error)
    return replace(_not_made(miss.detail), is_policy_error=miss.reason is MissReason.POLICY_ERROR)


def _pages() -> CudaPages | None:
    """Return what locks host memory for copies to a GPU; None where there is none."""
    if not torch.cuda.is_available():
        return None
    from kvgraft.memory.page_lock import CudaPages

    return CudaPages()


def _under_way(config: VLLMConfig) -> int:
    return max(_LEAST_QUEUE_BYTES, config.host_bytes // 4)
