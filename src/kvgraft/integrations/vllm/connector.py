"""`GraftConnector`: what vLLM loads. It holds one of the two halves and passes calls on."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvgraft.config import VLLMConfig, ignored_variables
from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.contract import drift
from kvgraft.integrations.vllm.engine_facts import read_facts
from kvgraft.integrations.vllm.metrics import GraftStats
from kvgraft.integrations.vllm.scheduler import GraftScheduler
from kvgraft.integrations.vllm.scheduler.public_events import public_events
from kvgraft.integrations.vllm.selection import is_default
from kvgraft.integrations.vllm.versions import installed_versions, untested
from kvgraft.integrations.vllm.worker.graft_worker import GraftWorker

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvgraft.integrations.vllm.messages import StepCommands, WorkerReport
    from kvgraft.integrations.vllm.prometheus import GraftPromMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepMetadata(KVConnectorMetadata):
    """Carries commands from the scheduler's process to workers."""

    commands: StepCommands


@dataclass(frozen=True, slots=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Carries a report back; vLLM joins those of all ranks."""

    report: WorkerReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerMetadata:
        """Join two ranks' reports."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.joined(other.report))


class GraftConnector(KVConnectorBase_V1, SupportsHMA):
    """Position-independent KV reuse for a stock vLLM.

    vLLM builds one object in the scheduler's process and one in each worker's. Settings are read from
    `kv_connector_extra_config` (`VLLMConfig`); a wrong one raises `ConfigError` at start. docs/integrations/vllm.md.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build the half for `role`; vLLM's factory insists on the names of the arguments."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _log_as_vllm_does()
        given = self._kv_transfer_config.kv_connector_extra_config or {}
        config = VLLMConfig.from_dict(given)
        self._scheduler: GraftScheduler | None = None
        self._worker: GraftWorker | None = None
        self._block_pool: BlockPool | None = None
        self._event_source: BlockPool | KVCacheManager | None = None
        self._events: list[KVCacheEvent] = []
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = self._build_scheduler(config, vllm_config, kv_cache_config)
        else:
            self._worker = GraftWorker(config, vllm_config, kv_cache_config, may_fall_back=is_default(given))

    def _build_scheduler(
        self, config: VLLMConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> GraftScheduler:
        facts = read_facts(config, vllm_config, kv_cache_config)
        for ignored in ignored_variables(VLLMConfig):
            logger.warning("%s", ignored)
        warning = untested(installed_versions())
        if warning:
            logger.warning("%s", warning)
        facts = facts if facts.refusal else replace(facts, refusal=drift())
        if facts.refusal:
            logger.warning("kvgraft grafts nothing on this server: %s", facts.refusal)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            # vLLM reads this afterwards. A failure of reuse must never be a failed request.
            logger.info("kvgraft sets kv_load_failure_policy to recompute")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
        scheduler = GraftScheduler(config, facts)
        if config.announce_donors and not facts.refusal:
            from kvgraft.integrations.vllm.donor_events import announce

            announce(scheduler.registry.catalogue, facts.fingerprint, vllm_config, self._publish)
        return scheduler

    @property
    def scheduler(self) -> GraftScheduler:
        """The scheduler's half, in its process only."""
        assert self._scheduler is not None, "a worker's connector has no scheduler"
        return self._scheduler

    @property
    def worker(self) -> GraftWorker:
        """The worker's half; only in its process."""
        assert self._worker is not None, "the scheduler's connector has no worker"
        return self._worker

    # ---- scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens after vLLM's own hit workers will make, and whether the request waits for them.

        The number is None while blocks of that hit hold no K/V yet: vLLM asks again in its next step.
        """
        return self.scheduler.match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Take the request's blocks."""
        self.scheduler.admit(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[Any, int]:
        """Return where the tokens of a graft come from; those that it computes have no source."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        sources = self.scheduler.sources(request.request_id, num_external_tokens)
        return {CacheHitSource(name): count for name, count in sources.items() if count}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """Return the commands of the step."""
        self._keep_public_events()
        commands = self.scheduler.commands(scheduler_output)
        if commands.repairs:
            scheduler_output.has_sync_kv_loads = True  # or vLLM calls `start_load_kv` after the step's forward pass
        return StepMetadata(commands)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the workers' report."""
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, WorkerMetadata):
            self.scheduler.receive(metadata.report)
        loaded = connector_output.finished_recving
        connector_output.finished_recving = self.scheduler.loaded(loaded or set()) or None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; the report goes to the client."""
        del block_ids
        return False, self.scheduler.finish(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, for models with several KV cache groups."""
        del block_ids
        return False, self.scheduler.finish(request)

    def reset_cache(self) -> bool | None:
        """Forget all donors; workers do so before anything else. vLLM asks the scheduler's side alone."""
        if self._scheduler is None:
            return None
        pool = self._block_pool  # vLLM resets its own cache first, which fails where any block is in use
        is_empty = pool is None or pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        self._scheduler.reset(prefixes_are_gone=is_empty)
        return True

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Take vLLM's pool, to see whether a reset reached it, and to publish no block that is a request's own."""
        self._block_pool = gpu_block_pool
        self._event_source = self._event_source or gpu_block_pool

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        """Take vLLM's manager: it knows which blocks a request hits and holds, and its events say more than the pool's."""
        self._event_source = kv_cache_manager
        self.scheduler.bind(kv_cache_manager)
        super().bind_kv_cache_manager(kv_cache_manager)

    def take_events(self) -> Iterable[KVCacheEvent]:
        """Return KV events of vLLM's prefix cache, without blocks after a graft (`public_events.py`), and of donors."""
        self._keep_public_events()
        events, self._events = self._events, []
        return events

    def _publish(self, event: KVCacheEvent) -> None:
        self._events.append(event)  # not the list's own method: `take_events` puts another list in its place

    def _keep_public_events(self) -> None:
        if self._event_source is None:
            return
        try:
            self._events += public_events(self._event_source.take_events())
        except Exception as error:
            self.scheduler.counts.failed(error)
            logger.exception("KV events were lost; routers know less, or more, than there is")

    # ---- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the paged caches.

        Raises:
            IntegrationError: A connector stands around this one that shows others what grafts computed.
        """
        group = get_kv_transfer_group()
        if group is not self and self not in getattr(group, "withholds_for", ()):
            raise IntegrationError(
                "GraftConnector cannot stand in MultiConnector: a store beside it would keep what grafts computed and serve "
                "it as exact; use GraftMultiConnector of kvgraft.integrations.vllm, with the same connectors"
            )
        self.worker.register(kv_caches)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        """Begin and continue grafts."""
        del forward_context, kwargs
        self.worker.load(self._commands())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: grafts are complete before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Do nothing: text is captured after the forward pass, all layers at once."""

    def wait_for_save(self) -> None:
        """Capture what was computed."""
        self.worker.save(self._commands())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that wait for a graft which has ended."""
        del finished_req_ids
        loaded, _ = self.worker.outbox.take_loaded()
        return None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:  # noqa: ANN401 - a type of vLLM 0.32 and later
        """As `get_finished`, with those that failed."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        del finished_req_ids
        loaded, failed = self.worker.outbox.take_loaded()
        return KVConnectorTransferResults(set(), loaded, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that a failed graft left without K/V."""
        return self.worker.outbox.take_failed_blocks()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        """Return the rank's report."""
        report = self.worker.take_report()
        return None if report is None else WorkerMetadata(report)

    def shutdown(self) -> None:
        """Let go of the model, or of a semantic provider."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    def _commands(self) -> StepCommands:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.commands

    # ---- metrics

    def get_kv_connector_stats(self) -> GraftStats | None:
        """Return counts since the last call; the scheduler has them all."""
        if self._scheduler is None:
            return None
        try:
            return self._stats()
        except Exception as error:
            self.scheduler.counts.failed(error)
            logger.exception("counts of a step are reported with those of the next one")
            return None

    def _stats(self) -> GraftStats | None:
        assert self._scheduler is not None
        self._keep_public_events()  # vLLM asks for statistics before the events of a step
        scheduler, catalogue = self._scheduler, self._scheduler.registry.catalogue
        scheduler.step_ended()
        taken = scheduler.counts.take(
            donors=len(catalogue),
            donor_tokens=catalogue.num_tokens,
            host_bytes=scheduler.host_bytes,
            host_limit_bytes=scheduler.host_limit_bytes,
            is_refused=bool(scheduler.refusal),
            cold_donors=scheduler.registry.num_stored,
        )
        return None if taken is None else GraftStats(taken)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> GraftStats | None:
        """Build statistics from what `GraftStats.data` held."""
        return GraftStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> GraftPromMetrics:
        """Build the Prometheus metrics of the server."""
        from kvgraft.integrations.vllm.prometheus import GraftPromMetrics  # loaded by the server, not by its engine

        return GraftPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return False: no hook runs inside a forward pass."""
        del extra_config
        return False


def _log_as_vllm_does() -> None:
    """Let what kvgraft logs appear where vLLM's log does: vLLM configures its own logger and no other."""
    ours, theirs = logging.getLogger("kvgraft"), logging.getLogger("vllm")
    if ours.hasHandlers() or not theirs.handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.level)
