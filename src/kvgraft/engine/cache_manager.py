"""The K/V side of a request's life: match, plan, pin, allocate; graft; grow; publish prefixes and donors; release."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import CostModel, Donor
from kvgraft.engine.request_kv import RequestKV
from kvgraft.errors import CapacityError, ConfigError
from kvgraft.graft.executor import RotatedSpans, SpanCopy, copy_spans
from kvgraft.memory import Owner
from kvgraft.prefix import RadixKey
from kvgraft.reuse.lineage import Lineage, reused_span
from kvgraft.types import GraftPlan, Match, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.donor_register import DonorRegister
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request import Request
    from kvgraft.engine.risk import HeldRisk
    from kvgraft.engine.windows import RequestWindows
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.reuse.lookup import Lookup
    from kvgraft.types import TokenArray

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
        windows: RequestWindows,
        register: DonorRegister,
        lookup: Lookup,
        *,
        flops: ModelFlops,
        refusal: str | None,
        risk: HeldRisk,
    ) -> None:
        """Take the parts.

        Args:
            adapter: The model.
            space: All K/V.
            windows: Slots of window layers.
            register: Makes donors of what requests compute.
            lookup: Finds donors and plans grafts.
            flops: What computing costs.
            refusal: Why K/V of this model must not be moved, or None.
            risk: At which notch grafts are served.
        """
        self.space = space
        self.flops = flops
        self._num_errors = 0
        self._adapter = adapter
        self._lengths = adapter.lengths
        self._windows = windows
        self._register = register
        self._lookup = lookup
        self._refusal = refusal
        self._risk = risk

    @property
    def num_errors(self) -> int:
        """Lookups, grafts and publications that failed and became misses."""
        return self._num_errors + self._windows.num_errors + self._lookup.num_errors

    def begin(self, request: Request, *, headroom: int = 0) -> RequestKV:
        """Match, plan, pin and allocate the prompt's slots and `headroom` more.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request holds nothing.
        """
        started = time.perf_counter()
        kv = self._locked_prefix(request)
        try:
            self._plan(kv)
            kv.timings_ms["lookup"] = (time.perf_counter() - started) * 1e3
            self._pin(kv)
            fresh = self._allocate_prompt(kv, headroom)
            kv.kv_indices = np.concatenate([kv.kv_indices, fresh])
            self._begin_windows(kv)
        except BaseException:
            self._release(kv)
            raise
        return kv

    def _locked_prefix(self, request: Request) -> RequestKV:
        """Begin with the exact prefix, which the request holds from now on."""
        num_tokens, epoch = len(request.token_ids), self.space.epoch
        namespace = self._lengths.namespace(request.namespace, num_tokens)
        slots, swa_indices, lock = np.empty(0, np.int64), np.empty(0, np.int64), None
        if request.reuse is not ReuseMode.OFF:
            # The last token is always computed: its logits are what the request is for.
            match = self.space.match(RadixKey(request.token_ids[:-1], namespace.key))
            slots, swa_indices, lock = match.kv_indices, match.swa_indices, self.space.lock(match.handle)
            self.space.allocator.retain(slots, Owner.REQUEST)
        plan = _no_graft(num_tokens, len(slots))
        kv = RequestKV(request, namespace, epoch, Lineage(len(slots)), plan, None, slots, lock, ())
        self._windows.adopt(kv, swa_indices, is_donor=self._leaves_donors(request))
        return kv

    def graft(self, kv: RequestKV) -> None:
        """Copy the plan's spans into the request's slots; donors are unpinned. A failure turns the plan into a miss."""
        with _timed(kv.timings_ms, "graft"):
            try:
                if kv.plan.spans:
                    self._copy(kv)
            except Exception as error:
                self._num_errors += 1
                logger.exception("graft of request %s failed; it is computed instead", kv.request.request_id)
                self._give_up_graft(kv, Miss(MissReason.ERROR, f"{type(error).__name__}: {error}"))
        self._unpin(kv)

    def grow(self, kv: RequestKV, num_tokens: int, *, headroom: int = 0) -> None:
        """See to it that `num_tokens` positions have slots, and add up to `headroom` more if slots run out otherwise.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request keeps what it has.
        """
        missing = num_tokens - len(kv.kv_indices)
        if missing > 0:
            after = int(kv.kv_indices[-1])
            count = min(missing + headroom, max(missing, self.space.available))
            slots = self.space.allocate(count, after=after)
            kv.kv_indices = np.concatenate([kv.kv_indices, slots])
            self._windows.widen(kv)
        self._windows.grow(kv, num_tokens)

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """Prepare to compute prompt rows at `positions`; returns how many of them can be computed now, maybe none.

        All of them, unless window layers have slots of their own and these are short.
        """
        return self._windows.reserve(kv, positions)

    def outgrows(self, kv: RequestKV, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` needs other angles than its K/V have, and must be begun again."""
        return self._lengths.is_long(num_tokens) and not self._lengths.is_long(kv.plan.num_tokens)

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
        return self._windows.longest_piece

    def publish(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Let others reuse what the request has computed: exact K/V as prefixes, its own text as donors.

        May be called again when there is more. A failure is logged and counted; the request is not harmed by it. Nothing is
        kept of a request that began before a reset: its K/V may be of other weights.

        Args:
            kv: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist: the prompt, then all generated tokens but the last.
        """
        with self._counted(kv):
            if kv.epoch == self.space.epoch:
                self._publish_prefix(kv, token_ids)
                self._register.register(kv, token_ids)
        self._windows.advance(kv, len(token_ids))

    def finish(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Publish and release the request; arguments as for `publish`."""
        try:
            self.publish(kv, token_ids)
        finally:
            self._release(kv)

    def suspend(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Release a request that will be begun again; what it computed exactly stays cached while there is room.

        A failure to store it is logged and counted; the request is computed again from its beginning then.

        Args:
            kv: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist.
        """
        try:
            with self._counted(kv):
                if kv.epoch == self.space.epoch:
                    self._publish_prefix(kv, token_ids)
        finally:
            self._release(kv)

    def abort(self, kv: RequestKV) -> None:
        """Release the request; nothing of it is kept."""
        self._release(kv)

    def _plan(self, kv: RequestKV) -> None:
        """Decide what to graft behind the exact prefix."""
        request = kv.request
        kv.risk = self._risk.stated(request)
        if request.reuse is not ReuseMode.GRAFT:
            kv.miss = Miss(MissReason.REUSE_OFF)
            return
        if self._refusal is not None:
            kv.miss = Miss(MissReason.MODEL_REFUSED, self._refusal)
            return
        costs = self._costs(request.policy)
        planned = self._lookup.find(kv.namespace, request.token_ids, kv.plan.exact_len, costs).planned
        if isinstance(planned, Miss):
            kv.miss = planned
            return
        found = (self.space.donors.get(match.donor_id) for match in planned.spans)
        donors = tuple(donor for donor in found if donor is not None)
        served = self._risk.serve(request, [reused_span(*pair) for pair in zip(planned.spans, donors, strict=True)])
        kv.risk, kv.sampled = served.statement, served.sampled
        if served.policy is None:
            kv.miss = Miss(MissReason.RISK, f"grafts of this kind are at notch {served.statement.notch!r}")
            return
        kv.plan, kv.donors, kv.request = planned, donors, replace(request, policy=served.policy)

    def _allocate_prompt(self, kv: RequestKV, headroom: int) -> NDArray[np.int64]:
        """Slots behind the exact prefix. Where the donors themselves take the room, the prompt is computed instead."""
        num_tokens = kv.plan.num_tokens - len(kv.kv_indices) + headroom
        after = int(kv.kv_indices[-1]) if len(kv.kv_indices) else None
        try:
            return self.space.allocate(num_tokens, after=after)
        except CapacityError:
            if not kv.pinned or num_tokens > self.space.available:
                raise
            self._give_up_graft(kv, Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
            return self.space.allocate(num_tokens, after=after)

    def _give_up_graft(self, kv: RequestKV, miss: Miss) -> None:
        self._unpin(kv)
        kv.lineage.withdraw()
        kv.miss, kv.donors, kv.sampled = miss, (), None
        kv.plan = _no_graft(kv.plan.num_tokens, kv.plan.exact_len)

    def _costs(self, policy: SelectionPolicy) -> CostModel:
        """Costs in floating-point operations; copying is memory traffic, converted by a typical ratio of the two."""
        return CostModel(
            compute_per_token=self.flops.per_token,
            attention_per_key=self.flops.per_visible_key,
            copy_per_token=self._adapter.pool.bytes_per_token * _FLOPS_PER_COPIED_BYTE,
            per_span=_FLOPS_PER_SPAN,
            recompute_ratio=policy.recompute_ratio,
        )

    def _copy(self, kv: RequestKV) -> None:
        adapter, swa_indices = self._adapter, kv.swa_indices
        copies = [self._span_copy(match, donor) for match, donor in zip(kv.plan.spans, kv.donors, strict=True)]
        spans = RotatedSpans(copies, adapter.rope, adapter.pool.device)
        where = spans.positions
        place = adapter.pool.place(kv.kv_indices[where], None if swa_indices is None else swa_indices[where])
        copy_spans(spans, place, range(adapter.num_layers))
        kv.lineage.copy(reused_span(match, donor) for match, donor in zip(kv.plan.spans, kv.donors, strict=True))
        for match in kv.plan.spans:
            self.space.donors.record_hit(match.donor_id, match.length)

    def _span_copy(self, match: Match, donor: Donor) -> SpanCopy:
        source_start = donor.start_position + match.donor_start
        return SpanCopy(self.space.source(donor, match), source_start, match.target_start, match.length)

    def _publish_prefix(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Give the exact prefix cache what a full prefill would have computed too: everything in front of the first graft."""
        exact_len = kv.lineage.exact_len(len(token_ids))
        key = RadixKey(token_ids[:exact_len], kv.namespace.key)
        self.space.store_prefix(key, kv.kv_indices[:exact_len], kv.windows)

    @contextmanager
    def _counted(self, kv: RequestKV) -> Iterator[None]:
        """Log and count a failure to keep K/V for others; the request goes on."""
        try:
            yield
        except Exception:
            self._num_errors += 1
            logger.exception("K/V of request %s is not kept for others", kv.request.request_id)

    def _leaves_donors(self, request: Request) -> bool:
        """Whether the text of a hybrid model's request becomes a donor. Only there does it cost memory that is not shared."""
        return request.reuse is ReuseMode.GRAFT and self._refusal is None and self.space.host.budget_bytes > 0

    def _begin_windows(self, kv: RequestKV) -> None:
        """Take the window slots that a graft needs, or see to it that there are some for the first rows to compute."""
        self._windows.widen(kv)
        if kv.plan.spans:
            try:
                self._windows.fill(kv, kv.plan.num_tokens)
            except CapacityError:
                self._give_up_graft(
                    kv, Miss(MissReason.NO_ROOM, "the graft does not fit into the window layers' slots")
                )
            else:
                return
        self._windows.require_room(kv, kv.plan.num_tokens)

    def _pin(self, kv: RequestKV) -> None:
        for donor in kv.donors:
            self.space.donors.pin(donor.donor_id)
            kv.pinned += (donor,)

    def _unpin(self, kv: RequestKV) -> None:
        for donor in kv.pinned:
            self.space.donors.unpin(donor.donor_id)
        kv.pinned = ()

    def _release(self, kv: RequestKV) -> None:
        self._unpin(kv)
        self._windows.release(kv)
        if kv.lock is not None:
            lock, kv.lock = kv.lock, None
            self.space.unlock(lock)
        if len(kv.kv_indices):
            self.space.allocator.release(kv.kv_indices, Owner.REQUEST)
            kv.kv_indices = kv.kv_indices[:0]


def _no_graft(num_tokens: int, exact_len: int) -> GraftPlan:
    return GraftPlan(num_tokens, exact_len, (), np.arange(exact_len, num_tokens))


@contextmanager
def _timed(timings: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        timings[step] = timings.get(step, 0.0) + (time.perf_counter() - started) * 1e3
