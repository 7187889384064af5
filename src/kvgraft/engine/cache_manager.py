"""The K/V side of a request's life: match, plan, pin, allocate; graft; grow; publish prefixes and donors; release."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import CostModel, Donor, plan_graft
from kvgraft.engine.donor_register import DonorRegister, HostDonors, SlotDonors
from kvgraft.engine.hybrid_space import HybridKVSpace
from kvgraft.engine.request import Request, RequestCache
from kvgraft.engine.windows import RequestWindows
from kvgraft.errors import CapacityError, ConfigError
from kvgraft.graft.executor import RotatedSpans, SpanCopy, copy_spans
from kvgraft.memory import Owner
from kvgraft.prefix import RadixKey
from kvgraft.types import GraftPlan, Match, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.rope_lengths import RopeLengths
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import Namespace, TokenArray

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
        lengths: RopeLengths,
        min_run: int,
        max_generation: int,
        refusal: str | None,
    ) -> None:
        self.space = space
        self.flops = flops
        self._lengths = lengths
        self._num_errors = 0
        self._adapter = adapter
        self._min_run = min_run
        self._max_generation = max_generation
        self._refusal = refusal
        self._windows: RequestWindows | None = None
        self._register: DonorRegister
        if isinstance(space, HybridKVSpace):
            self._windows = RequestWindows(space)
            self._register = HostDonors(space, self._windows, min_run=min_run, max_generation=max_generation)
        else:
            self._register = SlotDonors(space, min_run=min_run, max_generation=max_generation)

    @property
    def num_errors(self) -> int:
        """Lookups, grafts and publications that failed and became misses."""
        return self._num_errors + (0 if self._windows is None else self._windows.num_errors)

    def begin(self, request: Request, *, headroom: int = 0) -> RequestCache:
        """Match, plan, pin and allocate the prompt's slots and `headroom` more.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request holds nothing.
        """
        timings: dict[str, float] = {}
        num_tokens = len(request.token_ids)
        namespace = self._lengths.namespace(request.namespace, num_tokens)
        prefix_slots, swa_indices, lock = np.empty(0, np.int64), np.empty(0, np.int64), None
        with _timed(timings, "lookup"):
            if request.reuse is not ReuseMode.OFF:
                # The last token is always computed: its logits are what the request is for.
                match = self.space.match(RadixKey(request.token_ids[:-1], namespace.key))
                prefix_slots, swa_indices, lock = match.kv_indices, match.swa_indices, self.space.lock(match.handle)
                self.space.allocator.retain(prefix_slots, Owner.REQUEST)
            planned, donors = self._plan(request, namespace, len(prefix_slots))
        miss = planned if isinstance(planned, Miss) else None
        plan = _no_graft(num_tokens, len(prefix_slots)) if isinstance(planned, Miss) else planned
        cache = RequestCache(request, namespace, self.space.epoch, plan, miss, prefix_slots, lock, donors, timings)
        self._pin(cache)
        try:
            if self._windows is not None:
                self._windows.adopt(cache, swa_indices, is_donor=self._leaves_donors(request))
            fresh = self._allocate_prompt(cache, headroom)
            cache.kv_indices = np.concatenate([prefix_slots, fresh])
            self._begin_windows(cache)
        except BaseException:
            self._release(cache)
            raise
        return cache

    def graft(self, cache: RequestCache) -> None:
        """Copy the plan's spans into the request's slots; donors are unpinned. A failure turns the plan into a miss."""
        with _timed(cache.timings_ms, "graft"):
            try:
                if cache.plan.spans:
                    self._copy(cache)
                for match in cache.plan.spans:
                    self.space.donors.record_hit(match.donor_id, match.length)
            except Exception as error:
                self._num_errors += 1
                logger.exception("graft of request %s failed; it is computed instead", cache.request.request_id)
                self._give_up_graft(cache, Miss(MissReason.ERROR, f"{type(error).__name__}: {error}"))
        self._unpin(cache)

    def grow(self, cache: RequestCache, num_tokens: int, *, headroom: int = 0) -> None:
        """See to it that `num_tokens` positions have slots, and add up to `headroom` more if slots run out otherwise.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request keeps what it has.
        """
        missing = num_tokens - len(cache.kv_indices)
        if missing > 0:
            after = int(cache.kv_indices[-1])
            count = min(missing + headroom, max(missing, self.space.available))
            slots = self.space.allocate(count, after=after)
            cache.kv_indices = np.concatenate([cache.kv_indices, slots])
            if self._windows is not None:
                self._windows.widen(cache)
        if self._windows is not None:
            self._windows.grow(cache, num_tokens)

    def reserve(self, cache: RequestCache, positions: NDArray[np.int64]) -> int:
        """Prepare to compute prompt rows at `positions`; returns how many of them can be computed now, maybe none.

        All of them, unless window layers have slots of their own and these are short.
        """
        return len(positions) if self._windows is None else self._windows.reserve(cache, positions)

    def outgrows(self, cache: RequestCache, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` needs other angles than its K/V have, and must be begun again."""
        return self._lengths.is_long(num_tokens) and not self._lengths.is_long(cache.plan.num_tokens)

    def require_one_table(self, prompt_len: int, num_tokens: int) -> None:
        """Raise `ConfigError` if a prompt that grows to `num_tokens` would outgrow its angles on the way."""
        if self._lengths.is_long(num_tokens) and not self._lengths.is_long(prompt_len):
            raise ConfigError(
                f"this model has other angles for more than {self._lengths.switch} tokens, and prompt and continuation lie "
                "on both sides; make the continuation shorter or the prompt longer"
            )

    @property
    def longest_piece(self) -> int | None:
        """Rows of a sequence that can always be computed in one piece if it runs alone; None for any number."""
        return None if self._windows is None else self._windows.longest_piece

    def publish(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Let others reuse what the request has computed: exact K/V as prefixes, its own text as donors.

        May be called again when there is more. A failure is logged and counted; the request is not harmed by it. Nothing is
        kept of a request that began before a reset: its K/V may be of other weights.

        Args:
            cache: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist: the prompt, then all generated tokens but the last.
        """
        with self._counted(cache):
            if cache.epoch == self.space.epoch:
                self._publish_prefix(cache, token_ids)
                self._register.register(cache, token_ids)
        if self._windows is not None:
            self._windows.advance(cache, len(token_ids))

    def finish(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Publish and release the request; arguments as for `publish`."""
        try:
            self.publish(cache, token_ids)
        finally:
            self._release(cache)

    def suspend(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Release a request that will be begun again; what it computed exactly stays cached while there is room.

        A failure to store it is logged and counted; the request is computed again from its beginning then.

        Args:
            cache: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist.
        """
        try:
            with self._counted(cache):
                if cache.epoch == self.space.epoch:
                    self._publish_prefix(cache, token_ids)
        finally:
            self._release(cache)

    def abort(self, cache: RequestCache) -> None:
        """Release the request; nothing of it is kept."""
        self._release(cache)

    def _plan(
        self, request: Request, namespace: Namespace, exact_len: int
    ) -> tuple[GraftPlan | Miss, tuple[Donor, ...]]:
        if request.reuse is not ReuseMode.GRAFT:
            return Miss(MissReason.REUSE_OFF), ()
        if self._refusal is not None:
            return Miss(MissReason.MODEL_REFUSED, self._refusal), ()
        donors = self.space.donors
        if not len(donors):
            return Miss(MissReason.NO_DONORS), ()
        try:
            matches = donors.find(namespace, request.token_ids, start=exact_len, max_generation=self._max_generation)
            planned = plan_graft(
                len(request.token_ids), exact_len, matches, self._cost_model(request.policy), min_run=self._min_run
            )
            if isinstance(planned, Miss):
                return planned, ()
            found = tuple(donors.get(match.donor_id) for match in planned.spans)
            return planned, tuple(donor for donor in found if donor is not None)
        except Exception as error:
            self._num_errors += 1
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

    def _copy(self, cache: RequestCache) -> None:
        adapter, swa_indices = self._adapter, cache.swa_indices
        copies = [self._span_copy(match, donor) for match, donor in zip(cache.plan.spans, cache.donors, strict=True)]
        spans = RotatedSpans(copies, adapter.rope, adapter.pool.device)
        where = spans.positions
        place = adapter.pool.place(cache.kv_indices[where], None if swa_indices is None else swa_indices[where])
        copy_spans(spans, place, range(adapter.num_layers))

    def _span_copy(self, match: Match, donor: Donor) -> SpanCopy:
        source_start = donor.start_position + match.donor_start
        return SpanCopy(self.space.source(donor, match), source_start, match.target_start, match.length)

    def _publish_prefix(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Give the exact prefix cache what a full prefill would have computed too: everything in front of the first graft."""
        exact_len = cache.exact_len(len(token_ids))
        key, slots = RadixKey(token_ids[:exact_len], cache.namespace.key), cache.kv_indices[:exact_len]
        if cache.windows is None or not isinstance(self.space, HybridKVSpace):
            self.space.store_prefix(key, slots)
        else:
            self.space.store_windows(key, slots, cache.windows.swa_indices[:exact_len], cache.windows.start)

    @contextmanager
    def _counted(self, cache: RequestCache) -> Iterator[None]:
        """Log and count a failure to keep K/V for others; the request goes on."""
        try:
            yield
        except Exception:
            self._num_errors += 1
            logger.exception("K/V of request %s is not kept for others", cache.request.request_id)

    def _leaves_donors(self, request: Request) -> bool:
        """Whether the text of a hybrid model's request becomes a donor. Only there does it cost memory that is not shared."""
        return request.reuse is ReuseMode.GRAFT and self._refusal is None and self.space.host.budget_bytes > 0

    def _begin_windows(self, cache: RequestCache) -> None:
        """Take the window slots that a graft needs, or see to it that there are some for the first rows to compute."""
        if self._windows is None:
            return
        self._windows.widen(cache)
        if cache.plan.spans:
            try:
                self._windows.fill(cache, cache.plan.num_tokens)
            except CapacityError:
                self._give_up_graft(
                    cache, Miss(MissReason.NO_ROOM, "the graft does not fit into the window layers' slots")
                )
            else:
                return
        self._windows.require_room(cache, cache.plan.num_tokens)

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
        if self._windows is not None and cache.windows is not None:
            self._windows.release(cache)
        if cache.lock is not None:
            lock, cache.lock = cache.lock, None
            self.space.unlock(lock)
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
