"""`GraftMultiConnector`: grafts beside stores of exact prefixes, none of which ever sees what a graft computed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)

from kvgraft.errors import ConfigError
from kvgraft.integrations.vllm.connector import GraftConnector
from kvgraft.integrations.vllm.known_stores import check_stores
from kvgraft.integrations.vllm.runner import takes_running_back
from kvgraft.integrations.vllm.scheduler.private_hashes import is_tainted
from kvgraft.integrations.vllm.scheduler.stored import NOTHING_STORED, StoredPrefix
from kvgraft.integrations.vllm.withheld import shown_to_stores

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    Finished = tuple[bool, dict[str, Any] | None]

logger = logging.getLogger(__name__)


class GraftMultiConnector(MultiConnector):
    """vLLM's MultiConnector with `GraftConnector` and stores in it, in any order. docs/integrations/vllm.md.

    A request is withheld from stores from the moment at which it is to be grafted: to them it waits from then on, and ends
    without blocks. What they save of it before is exact. All requests are withheld while it is not certain that
    vLLM's prefix cache and the stores hold K/V of the model as it is now.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Build all connectors for `role`.

        Raises:
            ConfigError: Connectors that cannot stand together; nothing was built.
        """
        ours = vllm_config.kv_transfer_config
        assert ours is not None, "vLLM builds connectors by this configuration"
        check_stores(ours.kv_connector_extra_config)
        if not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager and not self.all_children_support_hma(ours):
            raise ConfigError(
                "a store beside GraftConnector cannot do with vLLM's hybrid KV cache manager: start with "
                "--disable-hybrid-kv-cache-manager"
            )
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        ours.kv_load_failure_policy = "recompute"  # as GraftConnector does where it stands alone
        (self.graft,) = (child for child in self._connectors if isinstance(child, GraftConnector))
        self._stores = [child for child in self._connectors if child is not self.graft]
        self._withheld: set[str] = set()
        self._known: set[str] = set()
        self._present: set[str] = set()
        self._stores_are_current = True
        self._is_grafting = False

    @property
    def withholds_for(self) -> tuple[KVConnectorBase_V1, ...]:
        """The connector whose requests stores do not see."""
        return (self.graft,)

    # ---- scheduler

    def on_new_request(self, request: Request) -> None:
        """Show all connectors a request; stores may begin to look for it."""
        self._present.add(request.request_id)
        super().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Ask stores, then grafts: the one that has more tokens serves, a store if they are as many."""
        found = self._found_in_stores(request, num_computed_tokens)
        if found is None:
            return None, False
        stored, store = found
        self._requests_to_connector.pop(request.request_id, None)
        grafted, waits = self.graft.scheduler.match(request, num_computed_tokens, stored)
        if is_tainted(request):
            self._withheld.add(request.request_id)
        if grafted is None:
            return None, False
        if grafted:
            self._requests_to_connector[request.request_id] = self._connectors.index(self.graft)
            return grafted, waits
        if store is None or request.request_id in self._withheld:
            return 0, False
        self._requests_to_connector[request.request_id] = self._connectors.index(store)
        return stored.num_tokens, stored.asynchronous

    def _found_in_stores(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[StoredPrefix, KVConnectorBase_V1 | None] | None:
        """Return the longest prefix that stores have; None while one of them still looks."""
        if not self._is_current():
            self._withheld.add(request.request_id)
        best: tuple[StoredPrefix, KVConnectorBase_V1 | None] = (NOTHING_STORED, None)
        if request.request_id in self._withheld:
            return best
        self._present.add(request.request_id)
        for store in self._stores:
            num_tokens, waits = store.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None
            # A load that fails would be computed by vLLM, which cannot be trusted with that in every runner.
            is_safe = waits or takes_running_back(self._vllm_config)
            if num_tokens > best[0].num_tokens and is_safe:
                best = StoredPrefix(num_tokens, waits), store
        return best

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Show the request's blocks to the connectors that may know of them."""
        chosen = self._requests_to_connector.get(request.request_id, -1)
        is_withheld = request.request_id in self._withheld
        for index, child in enumerate(self._connectors):
            if child is self.graft or not is_withheld:
                child.update_state_after_alloc(request, blocks, num_external_tokens if index == chosen else 0)
        if not is_withheld:
            self._known.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        """Return commands of the step; those of stores are about requests that they may know."""
        if not self._is_current():
            self._withheld |= self._known
        shown = shown_to_stores(scheduler_output, self._withheld, self._known)
        metadata = tuple(
            child.build_connector_meta(scheduler_output if child is self.graft else shown) for child in self._connectors
        )
        if getattr(shown, "has_sync_kv_loads", False):  # a connector may ask to run before the forward pass
            scheduler_output.has_sync_kv_loads = True
        saves = dict(self._extra_async_saves)
        self._extra_async_saves.clear()
        return MultiKVConnectorMetadata(metadata=metadata, extra_async_saves=saves or None)

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        """End a request on all connectors; those that may not know of its blocks are shown none."""
        return self._finish(request, lambda child, shown: child.request_finished(request, block_ids if shown else []))

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> Finished:
        """As `request_finished`, for models with several KV cache groups."""
        if not self._all_support_hma:
            return self.request_finished(request, block_ids[0])
        none: tuple[list[int], ...] = tuple([] for _ in block_ids)
        return self._finish(
            request,
            lambda child, shown: child.request_finished_all_groups(request, block_ids if shown else none),
        )

    def _finish(self, request: Request, end: Callable[[KVConnectorBase_V1, bool], Finished]) -> Finished:
        is_withheld = request.request_id in self._withheld
        for remembered in (self._withheld, self._known, self._present):
            remembered.discard(request.request_id)

        def ended(child: KVConnectorBase_V1) -> Finished:
            if child is self.graft or not is_withheld:
                return end(child, True)
            try:
                return end(child, False)
            except Exception:  # a store need not know what to do at the end of a request that it was never asked about
                logger.exception("%s fails at the end of a withheld request", type(child).__name__)
                return False, None

        finished: Finished = self._aggregate_request_finished(request, ended)
        return finished

    def register_finished_partial_tail(
        self, request: Request, block_ids: tuple[list[int], ...], partial_tail_offloads: list[tuple[int, int, int]]
    ) -> bool:
        """Offer a last, partial block to the connectors that may know of it."""
        is_withheld = request.request_id in self._withheld
        return not is_withheld and super().register_finished_partial_tail(request, block_ids, partial_tail_offloads)

    def reset_cache(self) -> bool:
        """Forget everything, of stores too; they are not used until all of them have.

        A store may keep K/V that a request on its way has locked, and yet report that it has forgotten all: only a reset
        while there is no request is believed.
        """
        is_busy, self._stores_are_current = bool(self._present), False
        self._withheld |= self._present  # what they go on computing stands on K/V of before
        results = [self.graft.reset_cache(), *(self._reset(store) for store in self._stores)]
        self._stores_are_current = not is_busy and all(result is True for result in results[1:])
        if not self._stores_are_current:
            reason = "requests are on their way" if is_busy else "a store did not forget what it has"
            logger.warning(
                "%s: nothing is loaded from or saved to stores until a reset of an idle server reaches them", reason
            )
        return all(result is not False for result in results)

    def _reset(self, store: KVConnectorBase_V1) -> bool | None:
        try:
            done: bool | None = store.reset_cache()
        except Exception:
            logger.exception("%s cannot be reset", type(store).__name__)
            return False
        return done

    def _is_current(self) -> bool:
        """Whether everything loaded and saved is of the model as it is now."""
        return self._stores_are_current and self.graft.scheduler.trusts_prefixes

    # ---- worker

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's signature
        """Begin loads and grafts; stores do not see the passes of grafts over the model."""
        for child in self._connectors:
            self._is_grafting = child is self.graft
            child.start_load_kv(forward_context, **kwargs)
        self._is_grafting = False

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Have stores wait in vLLM's own pass, which their metadata are about."""
        if not self._is_grafting:
            super().wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Have stores save in vLLM's own pass; ours run earlier, when blocks of the step are not filled yet."""
        if not self._is_grafting:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """Save and capture what was computed."""
        for child in self._connectors:
            self._is_grafting = child is self.graft
            child.wait_for_save()
        self._is_grafting = False

    def get_kv_connector_kv_cache_events(self) -> Any:  # noqa: ANN401 - a container of the store's own kind
        """Return events of the first store that has any; vLLM's MultiConnector passes none on."""
        found = (store.get_kv_connector_kv_cache_events() for store in self._stores)
        return next((events for events in found if events is not None), None)

    # ---- metrics

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Build statistics, which arrive by class name, also of connectors that are not in vLLM's list."""
        known = {}
        for name, given in (data or {}).items():
            if name == GraftConnector.__name__:
                known[name] = given if not isinstance(given, dict) else GraftConnector.build_kv_connector_stats(given)
            elif not isinstance(given, dict) or name in KVConnectorFactory._registry:
                known |= super().build_kv_connector_stats({name: given}).data
        return MultiKVConnectorStats(data=known)
