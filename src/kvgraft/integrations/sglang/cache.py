"""SGLang's unified radix cache with reuse at any offset. The tree, its Rust core and its accounting stay SGLang's.

Only decisions that SGLang leaves to a cache are overridden: promises of a match (`match_prefix`), loading of promised tokens
(`init_load_back`), their owner (`load_back_is_cache_owned`), the slots that a request begins with (`prefix_device_indices`),
and checkpoints, release and eviction. Interfaces: SGLang 0.5.22 and 0.5.23.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvgraft.errors import CorruptCacheError
from kvgraft.integrations.sglang.donors.ranges import subtract
from kvgraft.integrations.sglang.donors.tree import Resident
from kvgraft.integrations.sglang.reporting.reports import was_aborted

if TYPE_CHECKING:
    from torch import Tensor

    from kvgraft.integrations.sglang.donor_events import DonorEvents
    from kvgraft.integrations.sglang.donors.texts import TreeText
    from kvgraft.integrations.sglang.reuse import RequestReuse


class GraftRadixCache(UnifiedRadixCache):  # type: ignore[misc]
    """SGLang's cache; `attach` switches reuse on."""

    def __init__(self, params: Any) -> None:  # noqa: ANN401 - SGLang's CacheInitParams
        self.reuse: RequestReuse | None = None
        self.donor_events: DonorEvents | None = None
        self._freed_by_eviction: list[Tensor] = []
        self._req_of_row: dict[int, Any] = {}
        self._batch: list[Any] = []
        super().__init__(params)

    def attach(self, reuse: RequestReuse) -> None:
        """Switch reuse on."""
        self.reuse = reuse

    # Matching and loading

    def match_prefix(self, params: Any) -> Any:  # noqa: ANN401 - MatchPrefixParams -> MatchResult
        """Match exactly, and promise the regions after the match as if they lay in host memory."""
        exact, req, key = super().match_prefix(params), params.req, params.key
        if self.reuse is None or req is None or req.kv.holds_kv or exact.host_hit_length:
            return exact
        prefix_len = exact.device_prefix_len
        if key.limit is None:
            # The scheduler sorts its queue; it matches again, with a limit, before it admits a request.
            promised = self.reuse.promises.promised(req, prefix_len)
        else:
            promised = self.reuse.promises.promise(req, key.token_ids, len(key), prefix_len, may_keep=True)
        if not promised:
            return exact
        node = exact.last_device_node
        return exact._replace(host_hit_length=promised, last_host_node=node, best_match_node=node)

    def init_load_back(self, params: Any) -> Any:  # noqa: ANN401 - InitLoadBackParams -> (int, node)
        """Copy what was promised into private slots: all of it or nothing."""
        req = params.req
        if self.reuse is None or not params.host_hit_length:
            return super().init_load_back(params)
        loaded = self.reuse.loading.load_first(req, params.host_hit_length)
        exact = self.path_device_indices(req.last_node)[: req.prefix_len]
        self.reuse.repairs.recompute(req, torch.cat([exact, *self.reuse.loading.private_slots(req)]))
        return loaded, req.last_node

    def load_back_is_cache_owned(self) -> bool:
        """Return False: copies belong to the request and leave with its row."""
        return self.reuse is None and bool(super().load_back_is_cache_owned())

    def prefix_device_indices(self, req: Any) -> Tensor:  # noqa: ANN401 - SGLang's Req
        """Return the slots of the exact prefix, then those loaded after it."""
        private = [] if self.reuse is None else self.reuse.loading.private_slots(req)
        if not private:
            indices: Tensor = super().prefix_device_indices(req)
            return indices
        return torch.cat([self.path_device_indices(req.last_node), *private])[: req.prefix_len]

    def look_up_again(self, req: Any) -> bool:  # noqa: ANN401
        """Renew the promise of `req`, which was just matched and is about to be admitted; whether it may have changed."""
        promised = None if self.reuse is None else self.reuse.promises.promise_again(req)
        if promised is None:
            return False
        req.host_hit_length = promised
        req.last_host_node = req.best_match_node = req.last_node
        return True

    def awaits_store(self, req: Any, *, may_nap: bool) -> bool:  # noqa: ANN401
        """Whether `req`, just matched, keeps its place in the queue until the K/V that are read for it have come."""
        return self.reuse is not None and self.reuse.promises.awaits(req, may_nap=may_nap)

    def is_too_much(self, req: Any, running: list[Any], num_rows: int) -> bool:  # noqa: ANN401
        """See `Repairs.is_too_much`."""
        return self.reuse is not None and self.reuse.repairs.is_too_much(req, running, num_rows)

    def rows_now(self, req: Any) -> int:  # noqa: ANN401
        """See `Repairs.rows_now`."""
        return 0 if self.reuse is None else self.reuse.repairs.rows_now(req)

    def next_gap(self, req: Any, position: int) -> int | None:  # noqa: ANN401
        """See `Loading.next_gap`."""
        return None if self.reuse is None else self.reuse.loading.next_gap(req, position)

    def load_nothing_between_chunks(self, req: Any) -> None:  # noqa: ANN401
        """Load for `req` what touches the exact prefix, and no more: its chunks cannot end where regions begin."""
        if self.reuse is not None:
            self.reuse.loading.load_first_only(req)

    def load_between_chunks(self, req: Any, room: int) -> None:  # noqa: ANN401
        """Load the regions at which `req`, between two chunks, has arrived, into its row."""
        if self.reuse is None:
            return
        slots = self.reuse.loading.load_next(req, room)
        if slots is not None:
            end = req.prefix_len + len(slots)
            self.req_to_token_pool.write((req.kv.req_pool_idx, slice(req.prefix_len, end)), slots.to(torch.int32))
            req.prefix_len = req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        self.reuse.repairs.recompute(
            req, self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : req.prefix_len].long()
        )

    # Between the first token and the second

    def repairs_due(self, batch: Any) -> list[Any]:  # noqa: ANN401 - SGLang's ScheduleBatch, or None
        """Return the requests that are to be repaired before `batch` is run."""
        if self.reuse is None or batch is None:
            return []
        return self.reuse.repairs.due(batch.reqs if batch.forward_mode.is_decode() else batch.decoding_reqs or ())

    def before_drawing(self, logits: Tensor | None, seq_lens: Tensor) -> None:
        """Repair requests of the batch that was begun last whose first token, drawn next, is not sure.

        Args:
            logits: (num_requests, vocab_size), changed in place; None where nothing is drawn.
            seq_lens: (num_requests,), their computed tokens.
        """
        if self.reuse is None or not self.reuse.repairs.waiting:
            return
        if logits is None or not len(logits) == len(seq_lens) == len(self._batch):
            return
        for number, req in enumerate(self._batch):
            if req in self.reuse.repairs.waiting:
                row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                self.reuse.repairs.before_first(req, row, int(seq_lens[number]), logits[number])

    def repair(self, batch: Any) -> None:  # noqa: ANN401
        """Compute what policies have chosen of the prompts of those requests into their rows, and begin the batch."""
        self._batch = [] if batch is None else list(batch.reqs)
        for req in self.repairs_due(batch):
            assert self.reuse is not None
            self.reuse.repairs.repair(req, self.req_to_token_pool.req_to_token[req.kv.req_pool_idx])

    # Publishing and release

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:  # noqa: ANN401
        """Publish, then make donors of what is in the tree; not reached by a request that holds copies."""
        super().checkpoint(req, up_to=up_to, **kwargs)
        if self.reuse is not None:
            self.reuse.publishing.published(req, req.last_node)

    def claim_kv_row(self, req: Any) -> bool:  # noqa: ANN401
        """Take over what later turns go on from; called first when a row is released."""
        if super().claim_kv_row(req):
            return True
        if self.reuse is not None and req.kv.holds_kv:
            self._req_of_row[req.kv.req_pool_idx] = req
            if req.finished() and not was_aborted(req):
                row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                self.reuse.publishing.adopt_computed(req, row, req.last_node)
        return False

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:  # noqa: ANN401
        """Free a row's ranges, but for those that the tree took over."""
        req = self._req_of_row.get(kv.req_pool_idx)
        if self.reuse is not None and req is not None:
            ranges = subtract(ranges, self.reuse.publishing.adopted(req))
        super().free_kv_row(kv, ranges)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:  # noqa: ANN401
        """The row is freed."""
        super().on_release(req, checkpointed=checkpointed)
        self._req_of_row.pop(req.kv.req_pool_idx, None)
        if self.reuse is not None:
            self.reuse.ends.released(req)

    def release_aborted_request(self, handle: Any) -> None:  # noqa: ANN401 - CacheRequestHandle
        """A request was aborted, in the queue or on its way."""
        super().release_aborted_request(handle)
        if self.reuse is not None:
            self.reuse.ends.aborted(handle)

    # Eviction

    def evict(self, params: Any) -> Any:  # noqa: ANN401 - EvictParams -> EvictResult
        """Evict, and let the host store have what goes."""
        try:
            return super().evict(params)
        finally:
            self._hand_evicted_over()

    def evict_for_alloc(self, params: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Evict for an allocation, and let the host store have what goes."""
        try:
            return super().evict_for_alloc(params, **kwargs)
        finally:
            self._hand_evicted_over()

    # Events

    def take_events(self) -> list[Any]:
        """Return SGLang's KV events without text under names of our own, which no listener could reuse, then those of donors.

        Removals stay: their hashes were never announced, and cannot be computed.
        """
        events: list[Any] = super().take_events()
        reuse = self.reuse
        if reuse is None:
            return events
        public = [
            event for event in events if not reuse.books.request_texts.is_private(getattr(event, "cache_salt", None))
        ]
        return public if self.donor_events is None else [*public, *self.donor_events.take()]

    def reset(self) -> None:
        """Flush."""
        super().reset()
        if self.reuse is not None:
            self.reuse.books.clear()

    def _free_values(self, device_frees: Any, host_frees: Any) -> None:  # noqa: ANN401
        """Note the slots of evicted nodes. The tree is in the middle of its walk and must not be asked anything."""
        if self.reuse is not None:
            self._freed_by_eviction += device_frees.get(ComponentType.FULL, [])
        super()._free_values(device_frees, host_frees)

    def _hand_evicted_over(self) -> None:
        """Nothing was allocated since, also where the eviction broke off: the K/V are still where they were."""
        freed, self._freed_by_eviction = self._freed_by_eviction, []
        if freed and self.reuse is not None:
            self.reuse.publishing.evicted(freed)


class SGLangTree:
    """`DonorTree` on SGLang's cache; never asks it for reuse."""

    def __init__(self, cache: GraftRadixCache) -> None:
        self._cache = cache
        self._page_size = int(cache.page_size)

    def resident(self, text: TreeText, end: int) -> Resident:
        """See `DonorTree.resident`."""
        length, node, _ = self._cache.tree_core.match_full_device_prefix(self._key(text, end))
        return Resident(int(length), node)

    def touch(self, text: TreeText, end: int) -> None:
        """See `DonorTree.touch`."""
        self._cache.touch_prefix(self._key(text, end))

    def _key(self, text: TreeText, end: int) -> Any:  # noqa: ANN401 - RadixKey
        limit = min(len(text.tokens), -(-end // self._page_size) * self._page_size)
        return RadixKey(text.tokens, text.extra_key, limit=limit, cache_salt=text.cache_salt)

    def pin(self, node: object) -> object:
        """See `DonorTree.pin`."""
        return self._cache.lock(node)

    def unpin(self, pin: object) -> None:
        """See `DonorTree.unpin`."""
        self._cache.unlock(pin)

    def slots(self, node: object) -> Tensor:
        """See `DonorTree.slots`."""
        indices: Tensor = self._cache.path_device_indices(node)
        return indices

    def allocate(self, num_tokens: int) -> Tensor | None:
        """See `DonorTree.allocate`."""
        allocator = self._cache.token_to_kv_pool_allocator
        lacking = num_tokens - allocator.available_size()
        if lacking > 0:
            self._cache.evict_for_alloc(EvictParams(num_tokens=lacking))
        slots: Tensor | None = allocator.alloc(num_tokens)
        return slots

    def free(self, slots: Tensor) -> None:
        """See `DonorTree.free`."""
        self._cache.token_to_kv_pool_allocator.free(slots)

    def adopt(self, text: TreeText, slots: Tensor, known: int) -> None:
        """See `DonorTree.adopt`."""
        key = RadixKey(text.tokens, text.extra_key, cache_salt=text.cache_salt)
        # Slots after `prev_prefix_len` that the tree has no use for are freed in it; here the row is.
        result = self._cache.insert(InsertParams(key=key, value=slots, prev_prefix_len=len(slots)))
        if result.prefix_len != known:
            raise CorruptCacheError(f"a name of our own had {result.prefix_len} tokens, not {known}")

    def empty(self) -> None:
        """See `DonorTree.empty`."""
        self._cache.evict(EvictParams(num_tokens=self._cache.full_evictable_size()))
