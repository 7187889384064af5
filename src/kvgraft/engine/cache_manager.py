"""The K/V side of a request's life: match, plan, pin, allocate; graft; grow; publish prefixes and donors; release."""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import CostModel, Donor, plan_graft
from kvgraft.engine.request import Request, RequestCache
from kvgraft.errors import CapacityError
from kvgraft.graft.executor import SpanCopy, copy_spans
from kvgraft.memory import Owner
from kvgraft.prefix import RadixKey
from kvgraft.types import GraftPlan, Match, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import DonorId, TokenArray

logger = logging.getLogger(__name__)

_FLOPS_PER_COPIED_BYTE = 30.0
"""A copied byte is read, rotated and written; processors and accelerators do 10-100 operations in that time."""
_FLOPS_PER_SPAN = 5e6
"""Bookkeeping of one more span: tens of microseconds."""


class CacheManager:
    """Takes requests through the cache. Every `begin` is followed by exactly one `finish` or `abort`. Not thread-safe.

    A failure while looking up or grafting is logged, counted in `num_errors` and becomes a miss; the request goes on.
    """

    def __init__(
        self,
        adapter: TransformersAdapter,
        space: KVSpace,
        *,
        flops: ModelFlops,
        min_run: int,
        max_generation: int,
        refusal: str | None,
    ) -> None:
        self.space = space
        self.flops = flops
        self.num_errors = 0
        self._adapter = adapter
        self._min_run = min_run
        self._max_generation = max_generation
        self._refusal = refusal

    def begin(self, request: Request, *, headroom: int = 0) -> RequestCache:
        """Match, plan, pin and allocate the prompt's slots and `headroom` more.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request holds nothing.
        """
        timings: dict[str, float] = {}
        num_tokens = len(request.token_ids)
        prefix_slots, handle = np.empty(0, np.int64), None
        with _timed(timings, "lookup"):
            if request.reuse is not ReuseMode.OFF:
                # The last token is always computed: its logits are what the request is for.
                match = self.space.prefix.match_prefix(RadixKey(request.token_ids[:-1], request.namespace.key))
                prefix_slots, handle = match.kv_indices, match.handle
                handle = self.space.prefix.inc_lock_ref(handle)
                self.space.allocator.retain(prefix_slots, Owner.REQUEST)
            planned, donors = self._plan(request, len(prefix_slots))
        miss = planned if isinstance(planned, Miss) else None
        plan = _no_graft(num_tokens, len(prefix_slots)) if isinstance(planned, Miss) else planned
        cache = RequestCache(request, plan, miss, prefix_slots, handle, donors, timings)
        self._pin(cache)
        try:
            fresh = self._allocate_prompt(cache, headroom)
        except BaseException:
            self._release(cache)
            raise
        cache.kv_indices = np.concatenate([prefix_slots, fresh])
        return cache

    def graft(self, cache: RequestCache) -> None:
        """Copy the plan's spans into the request's slots; donors are unpinned. A failure turns the plan into a miss."""
        with _timed(cache.timings_ms, "graft"):
            try:
                copies = [
                    self._span_copy(match, donor) for match, donor in zip(cache.plan.spans, cache.donors, strict=True)
                ]
                copy_spans(self._adapter, copies, cache.kv_indices)
                for match in cache.plan.spans:
                    self.space.donors.record_hit(match.donor_id, match.length)
            except Exception as error:
                self.num_errors += 1
                logger.exception("graft of request %s failed; it is computed instead", cache.request.request_id)
                self._give_up_graft(cache, Miss(MissReason.ERROR, f"{type(error).__name__}: {error}"))
        self._unpin(cache)

    def grow(self, cache: RequestCache, num_tokens: int, *, headroom: int = 0) -> None:
        """See to it that `num_tokens` positions have slots, and add up to `headroom` more if slots run out otherwise.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request keeps what it has.
        """
        missing = num_tokens - len(cache.kv_indices)
        if missing <= 0:
            return
        after = int(cache.kv_indices[-1])
        count = min(missing + headroom, max(missing, self.space.available))
        slots = self.space.allocate(count, after=after)
        cache.kv_indices = np.concatenate([cache.kv_indices, slots])

    def publish(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Let others reuse what the request has computed: exact K/V as prefixes, its own text as donors.

        May be called again when there is more. A failure is logged and counted; the request is not harmed by it.

        Args:
            cache: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist: the prompt, then all generated tokens but the last.
        """
        try:
            self._publish_prefix(cache, token_ids)
            self._register(cache, token_ids)
        except Exception:
            self.num_errors += 1
            logger.exception("K/V of request %s is not kept for others", cache.request.request_id)

    def finish(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Publish and release the request; arguments as for `publish`."""
        try:
            self.publish(cache, token_ids)
        finally:
            self._release(cache)

    def suspend(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Release a request that will be begun again; what it computed exactly stays cached while there is room.

        Args:
            cache: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist.
        """
        try:
            self._publish_prefix(cache, token_ids)
        finally:
            self._release(cache)

    def abort(self, cache: RequestCache) -> None:
        """Release the request; nothing of it is kept."""
        self._release(cache)

    def _plan(self, request: Request, exact_len: int) -> tuple[GraftPlan | Miss, tuple[Donor, ...]]:
        if request.reuse is not ReuseMode.GRAFT:
            return Miss(MissReason.REUSE_OFF), ()
        if self._refusal is not None:
            return Miss(MissReason.MODEL_REFUSED, self._refusal), ()
        donors = self.space.donors
        if not len(donors):
            return Miss(MissReason.NO_DONORS), ()
        try:
            matches = donors.find(
                request.namespace, request.token_ids, start=exact_len, max_generation=self._max_generation
            )
            planned = plan_graft(
                len(request.token_ids), exact_len, matches, self._cost_model(request.policy), min_run=self._min_run
            )
            if isinstance(planned, Miss):
                return planned, ()
            found = tuple(donors.get(match.donor_id) for match in planned.spans)
            return planned, tuple(donor for donor in found if donor is not None)
        except Exception as error:
            self.num_errors += 1
            logger.exception("lookup for request %s failed; it is computed instead", request.request_id)
            return Miss(MissReason.ERROR, f"{type(error).__name__}: {error}"), ()

    def _allocate_prompt(self, cache: RequestCache, headroom: int) -> NDArray[np.int64]:
        """Slots behind the exact prefix. Where the donors themselves take the room, the prompt is computed instead."""
        num_tokens = cache.plan.num_tokens - len(cache.kv_indices) + headroom
        after = int(cache.kv_indices[-1]) if len(cache.kv_indices) else None
        try:
            return self.space.allocate(num_tokens, after=after)
        except CapacityError:
            if not cache.pinned or num_tokens > self.space.available:
                raise
            self._give_up_graft(cache, Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
            return self.space.allocate(num_tokens, after=after)

    def _give_up_graft(self, cache: RequestCache, miss: Miss) -> None:
        self._unpin(cache)
        cache.miss, cache.donors = miss, ()
        cache.plan = _no_graft(cache.plan.num_tokens, cache.plan.exact_len)

    def _cost_model(self, policy: SelectionPolicy) -> CostModel:
        """Costs in floating-point operations; copying is memory traffic, converted by a typical ratio of the two."""
        return CostModel(
            compute_per_token=self.flops.per_token,
            attention_per_key=self.flops.per_visible_key,
            copy_per_token=self._adapter.pool.bytes_per_token * _FLOPS_PER_COPIED_BYTE,
            per_span=_FLOPS_PER_SPAN,
            recompute_ratio=policy.recompute_ratio,
        )

    def _span_copy(self, match: Match, donor: Donor) -> SpanCopy:
        source_start = donor.start_position + match.donor_start
        return SpanCopy(self.space.source(donor, match), source_start, match.target_start, match.length)

    def _publish_prefix(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Give the exact prefix cache what a full prefill would have computed too: everything in front of the first graft."""
        exact_len = cache.exact_len(len(token_ids))
        slots = cache.kv_indices[:exact_len]
        result = self.space.prefix.insert(RadixKey(token_ids[:exact_len], cache.request.namespace.key), slots)
        self.space.allocator.retain(slots[result.prefix_len : result.total_len], Owner.CACHE)

    def _register(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Register what this request computed as donors; grafted tokens never."""
        namespace, donors = cache.request.namespace, self.space.donors
        if not cache.plan.spans:
            known = donors.find(namespace, token_ids, max_generation=0)
            if any(match.length == len(token_ids) for match in known):
                return
            self._remove_superseded(known)
            self._add(cache, token_ids, 0, len(token_ids), 0)
            return
        generations = {donor.donor_id: donor.generation for donor in cache.donors}
        attended = 0
        start = cache.plan.exact_len  # what the prefix cache gave came from a request that registered it
        for match in cache.plan.spans:
            self._add_once(cache, token_ids, start, match.target_start, attended)
            attended = max(attended, 1 + generations[match.donor_id])
            start = match.target_end
        self._add_once(cache, token_ids, start, len(token_ids), attended)

    def _add_once(self, cache: RequestCache, token_ids: TokenArray, start: int, stop: int, generation: int) -> None:
        """Register a piece of a grafted request; a longer version replaces what was registered from the same start."""
        known = cache.registered.get(start)
        if known is not None:
            donor = self.space.donors.get(known)
            if donor is not None and donor.num_tokens == stop - start:
                return
            if donor is not None and not self.space.donors.is_pinned(known):
                self.space.remove_donor(known)
        donor_id = self._add(cache, token_ids, start, stop, generation)
        if donor_id is not None:
            cache.registered[start] = donor_id

    def _remove_superseded(self, matches: Sequence[Match]) -> None:
        """Drop donors that the sequence about to be registered begins with, where nobody else grafts from them."""
        for match in matches:
            donor = self.space.donors.get(match.donor_id)
            if donor is None or self.space.donors.is_pinned(donor.donor_id):
                continue
            if match.target_start == donor.start_position == 0 and match.length == donor.num_tokens:
                self.space.remove_donor(donor.donor_id)

    def _add(
        self, cache: RequestCache, token_ids: TokenArray, start: int, stop: int, generation: int
    ) -> DonorId | None:
        if stop - start < self._min_run or generation > self._max_generation:
            return None
        context = hashlib.blake2b(token_ids[:start].tobytes(), digest_size=16).digest() if start else b""
        return self.space.add_donor(
            cache.request.namespace,
            token_ids[start:stop],
            cache.kv_indices[start:stop].copy(),
            generation=generation,
            start_position=start,
            context=context,
        )

    def _pin(self, cache: RequestCache) -> None:
        for donor in cache.donors:
            self.space.donors.pin(donor.donor_id)
            cache.pinned += (donor,)

    def _unpin(self, cache: RequestCache) -> None:
        for donor in cache.pinned:
            self.space.donors.unpin(donor.donor_id)
        cache.pinned = ()

    def _release(self, cache: RequestCache) -> None:
        self._unpin(cache)
        if cache.handle is not None:
            freed = self.space.prefix.dec_lock_ref(cache.handle).freed
            cache.handle = None
            if len(freed):
                self.space.allocator.release(freed, Owner.CACHE)
        if len(cache.kv_indices):
            self.space.allocator.release(cache.kv_indices, Owner.REQUEST)
            cache.kv_indices = cache.kv_indices[:0]


def _no_graft(num_tokens: int, exact_len: int) -> GraftPlan:
    return GraftPlan(num_tokens, exact_len, (), np.arange(exact_len, num_tokens))


@contextmanager
def _timed(timings: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        timings[step] = timings.get(step, 0.0) + (time.perf_counter() - started) * 1e3
