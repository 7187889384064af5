"""The K/V side of a request's life: match, plan, pin, allocate; graft; grow; publish prefixes and donors; release."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import CostModel
from kvgraft.engine.grafting import Grafting
from kvgraft.engine.request_kv import RequestKV
from kvgraft.engine.stand_ins import StandIns
from kvgraft.errors import CapacityError, ConfigError, PolicyError
from kvgraft.graft.select import NoRecompute, expected_share, looks_at_query
from kvgraft.graft.sparse_prefill import QUERY_ROWS, SparsePrefill
from kvgraft.memory import Owner
from kvgraft.prefix import RadixKey
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.lineage import Lineage
from kvgraft.types import GraftPlan, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.donor_register import DonorRegister
    from kvgraft.engine.flops import ModelFlops
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request import Request
    from kvgraft.engine.risk import HeldRisk
    from kvgraft.engine.windows import RequestWindows
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.reuse import ProposalCounters
    from kvgraft.reuse.lookup import Lookup
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.types import DonorId, TokenArray

logger = logging.getLogger(__name__)

_FLOPS_PER_COPIED_BYTE = 30.0
"""A copied byte is read, rotated and written; processors and accelerators do 10-100 operations in that time."""
_FLOPS_PER_SPAN = 5e6
"""Bookkeeping of one more span: tens of microseconds."""
_ROWS_RUN_TWICE = QUERY_ROWS
"""`SparsePrefill` runs so many of the last rows once more where the policy looks at what they attend to."""


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
        substitutes: Substitutes | None = None,
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
            substitutes: Names texts whose K/V may stand in; None for none.
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
        self._grafting = Grafting(adapter, space, risk, flops)
        self._substitutes = substitutes
        self._stand_ins = None if substitutes is None else StandIns(space, substitutes)

    @property
    def proposals(self) -> ProposalCounters:
        """What proposed donors were good for."""
        return self._lookup.proposals

    @property
    def num_errors(self) -> int:
        """Lookups, transfers, grafts, publications and calls of a semantic provider that failed and became misses."""
        substitutes = 0 if self._substitutes is None else self._substitutes.num_errors
        parts = (self._windows, self._lookup, self.space, self._grafting)
        return self._num_errors + sum(part.num_errors for part in parts) + substitutes

    def begin(self, request: Request, *, headroom: int = 0, stop: int | None = None) -> RequestKV:
        """Match, plan, pin and allocate the prompt's slots and `headroom` more.

        Args:
            request: Whose prompt.
            headroom: Slots besides.
            stop: Begin with the positions in front of it alone, which are computed and kept for others whatever the request
                reuses: a piece of a text that heals. None for the whole prompt.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request holds nothing.
        """
        started = time.perf_counter()
        kv = self._locked_prefix(request, stop)
        kv.moments["lookup"] = started
        try:
            self._plan(kv)
            kv.timings_ms["lookup"] = (time.perf_counter() - started) * 1e3
            self._pin(kv)
            fresh = self._allocate_prompt(kv, headroom)
            kv.kv_indices = np.concatenate([kv.kv_indices, fresh])
            self._begin_windows(kv)
            if request.reuse is ReuseMode.VERIFIED:
                kv.draft_room = self._draft_room(kv)
            self._grafting.begin_reads(kv, request)
        except BaseException:
            self._release(kv)
            raise
        return kv

    def reset(self) -> None:
        """Forget all prefixes and donors, and which prompts reused them; see `KVSpace.reset`."""
        self.space.reset()
        self._lookup.reset()

    def exact_len(self, request: Request) -> int:
        """Tokens of the request's prompt whose exact K/V the prefix cache has; its last one may be among them."""
        namespace = self._lengths.namespace(request.namespace, len(request.token_ids))
        return self.space.match(RadixKey(request.token_ids, namespace.key)).prefix_len

    def retire(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """Remove approximate donors whose text exact ones have; returns those that stay. See `DonorRegister.retire`."""
        return self._register.retire(donor_ids)

    def join(self, kv: RequestKV, made: Iterable[DonorId]) -> None:
        """Let the donors that were made of a text before and those of its last piece be one; stores are offered that.

        Args:
            kv: Of the last piece, published.
            made: Donors made of the pieces before it; some may be gone.
        """
        with self._counted(kv):
            kv.made = self._register.join([*made, *kv.made])
            self._grafting.names.note(kv.request, kv.made)

    def _locked_prefix(self, request: Request, stop: int | None) -> RequestKV:
        """Begin with the exact prefix, which the request holds from now on."""
        epoch = self.space.epoch
        namespace = self._lengths.namespace(request.namespace, len(request.token_ids))
        token_ids = request.token_ids[:stop]
        slots, swa_indices, lock = np.empty(0, np.int64), np.empty(0, np.int64), None
        if request.reuse is not ReuseMode.OFF:
            # The last token is always computed: its logits are what the request is for.
            key = RadixKey(token_ids[:-1], namespace.key)
            match = self.space.match(key)
            slots, swa_indices, lock = match.kv_indices, match.swa_indices, self.space.lock(match.handle)
            if request.session is not None:
                slots = np.concatenate([slots, self.space.tail_behind(request.session.name, key, match)])
            self.space.allocator.retain(slots, Owner.REQUEST)
        plan = GraftPlan.over(len(token_ids), len(slots))
        kv = RequestKV(request, namespace, epoch, Lineage(len(slots)), plan, None, slots, lock, ())
        self._windows.adopt(kv, swa_indices, is_donor=self._leaves_donors(request, is_healing=stop is not None))
        if stop is not None:
            kv.stored_len = len(slots)  # the request that heals has used them, and nobody since
        return kv

    def graft(self, kv: RequestKV) -> None:
        """Copy the plan's spans into the request's slots; donors are unpinned. A failure turns the plan into a miss.

        Where spans come from a store (`kv.reads`), `load` is called until it says that all is there.
        """
        with self._attempt(kv):
            self._grafting.copy_at_hand(kv)
            if kv.reads is None:
                self._grafting.note(kv)
        if kv.reads is None:
            self._unpin(kv)

    def load(self, kv: RequestKV) -> bool:
        """Copy what has come from stores since the last call; True when the prompt can be computed. Never waits."""
        reads, stores = kv.reads, self.space.stores
        if reads is None or stores is None:
            return True
        with self._attempt(kv):
            if not self._grafting.copy_arrived(kv):
                return False
            miss = self._grafting.cut(kv)
            if miss is None:
                self._grafting.note(kv)
            else:
                self._give_up_graft(kv, miss)
        kv.reads = None
        self._unpin(kv)
        stores.used(reads)
        return True

    def prefill(self, kv: RequestKV) -> SparsePrefill:
        """Return what names the rows of the request's prompt; its reused K/V lie in their slots.

        Where the policy fails, now or later, the plan becomes a miss at once: what is about to be computed in full is not
        told of as grafted.
        """
        return SparsePrefill(
            kv.request.token_ids,
            kv.plan,
            kv.kv_indices,
            kv.request.policy if kv.plan.is_approximate else NoRecompute(),
            swa_indices=kv.swa_indices,
            correction=kv.request.correction,
            num_layers=self._adapter.num_layers,
            on_policy_error=lambda error: self._give_up_graft(kv, self._policy_miss(kv, error)),
        )

    def _policy_miss(self, kv: RequestKV, error: PolicyError) -> Miss:
        """Log and count a policy that failed."""
        self._num_errors += 1
        logger.error("request %s is computed in full: %s", kv.request.request_id, error, exc_info=error)
        return miss_of(error)

    def settle(self, kv: RequestKV) -> None:
        """Load what the plan names, and wait for it as long as a request may. For callers that run nothing else."""
        while not self.load(kv):
            assert kv.reads is not None
            kv.reads.wait(1.0)

    @contextmanager
    def _attempt(self, kv: RequestKV) -> Iterator[None]:
        """Turn the plan into a miss where copying fails."""
        with _timed_graft(kv):
            try:
                yield
            except Exception as error:
                self._num_errors += 1
                logger.exception("graft of request %s failed; it is computed instead", kv.request.request_id)
                self._give_up_graft(kv, miss_of(error))

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
                self._grafting.names.note(kv.request, kv.made)
        self._windows.advance(kv, len(token_ids))

    def finish(self, kv: RequestKV, token_ids: TokenArray, *, keep_as: Hashable = None) -> None:
        """Publish and release the request.

        Args:
            kv: As for `publish`.
            token_ids: As for `publish`.
            keep_as: Session for which what is exact is kept from eviction; None for none.
        """
        try:
            self.publish(kv, token_ids)
            if keep_as is not None:
                self._keep(keep_as, kv, token_ids)
            if self._substitutes is not None and kv.epoch == self.space.epoch:
                with self._counted(kv):
                    self._substitutes.heard(kv.request.request_id, token_ids, kv.lineage)
        finally:
            self._offer(kv)
            self._release(kv)

    def close(self) -> None:
        """Let the semantic provider, if there is one, give back its resources."""
        if self._substitutes is not None:
            self._substitutes.close()

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

    def heal(self, kv: RequestKV, token_ids: TokenArray, donor_ids: Sequence[DonorId]) -> list[DonorId]:
        """Publish the exact K/V of a beginning and release its request; approximate donors that lie in it become exact ones.

        Nothing else of it becomes a donor: its text has had donors since it was answered.

        Args:
            kv: As `begin` returned it.
            token_ids: Tokens of the positions whose K/V exist.
            donor_ids: Donors of generation > 0 that were made of the whole text.

        Returns:
            Those of them that stay as they are, for now.

        Raises:
            Exception: What failed; `abort` gives everything back then.
        """
        self._publish_prefix(kv, token_ids)
        left = self._register.heal(kv, token_ids, donor_ids)
        self._grafting.names.note(kv.request, kv.made)
        self._offer(kv)
        self._release(kv)
        return left

    def abort(self, kv: RequestKV) -> None:
        """Release the request; nothing is kept but what it has published."""
        self._offer(kv)
        self._release(kv)

    def _offer(self, kv: RequestKV) -> None:
        """Have stores given what donors were made of the request: once, when it ends, however often it published."""
        if self.space.stores is not None and kv.made:
            with self._counted(kv):
                self.space.stores.writes.offer(kv.made)

    def _plan(self, kv: RequestKV) -> None:
        """Decide what to graft behind the exact prefix."""
        request = kv.request
        kv.risk = self._risk.stated(request)
        if not request.reuse.grafts:
            kv.miss = Miss(MissReason.REUSE_OFF)
            return
        if self._refusal is not None:
            kv.miss = Miss(MissReason.MODEL_REFUSED, self._refusal)
            return
        try:
            costs = self._costs(request.policy)
        except PolicyError as error:
            kv.miss = self._policy_miss(kv, error)
            return
        read_cost = None if self.space.stores is None else self.space.stores.read_cost
        found = self._lookup.find(
            kv.namespace,
            request.token_ids,
            kv.plan.exact_len,
            costs,
            read_cost=read_cost,
            may_refresh=request.reuse is ReuseMode.GRAFT,
        )
        if not (request.reuse is ReuseMode.SUBSTITUTE and self._takes_stand_in(kv, found.planned)):
            self._grafting.adopt(kv, found)

    def _takes_stand_in(self, kv: RequestKV, planned: GraftPlan | Miss) -> bool:
        """Let another text stand in if that gains more; a failure is logged and counted, and gains nothing."""
        try:
            return self._stand_ins is not None and self._stand_ins.take(kv, planned)
        except Exception:
            self._num_errors += 1
            logger.exception("no other text stands in for request %s", kv.request.request_id)
            return False

    def _allocate_prompt(self, kv: RequestKV, headroom: int) -> NDArray[np.int64]:
        """Slots behind the exact prefix. Where the donors themselves take the room, the prompt is computed instead."""
        num_tokens = kv.plan.num_tokens - len(kv.kv_indices) + headroom
        after = int(kv.kv_indices[-1]) if len(kv.kv_indices) else None
        try:
            return self.space.allocate(num_tokens, after=after)
        except CapacityError:
            if not (kv.pinned or kv.stand_in_lock) or num_tokens > self.space.available:
                raise
            self._give_up_graft(kv, Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
            return self.space.allocate(num_tokens, after=after)

    def _draft_room(self, kv: RequestKV) -> int:
        """Positions behind the prompt that have slots and the angles of the prompt."""
        num_tokens, switch = kv.plan.num_tokens, self._lengths.switch
        end = len(kv.kv_indices)
        if switch is not None and not self._lengths.is_long(num_tokens):
            end = min(end, switch)
        return end - num_tokens

    def _give_up_graft(self, kv: RequestKV, miss: Miss) -> None:
        self._forget_reads(kv)
        self._unpin(kv)
        kv.lineage.withdraw()
        kv.miss, kv.donors, kv.sampled, kv.substitution = miss, (), None, None
        kv.plan = GraftPlan.over(kv.plan.num_tokens, kv.plan.exact_len)

    def _costs(self, policy: SelectionPolicy) -> CostModel:
        """Costs in floating-point operations; copying is memory traffic, converted by a typical ratio of the two."""
        return CostModel(
            compute_per_token=self.flops.per_token,
            attention_per_key=self.flops.per_visible_key,
            copy_per_token=self._adapter.pool.bytes_per_token * _FLOPS_PER_COPIED_BYTE,
            per_span=_FLOPS_PER_SPAN,
            recompute_ratio=expected_share(policy),
            query_rows=_ROWS_RUN_TWICE if looks_at_query(policy) else 0,
        )

    def _publish_prefix(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Give the exact prefix cache what a full prefill would have computed too: everything in front of the first graft."""
        exact_len = kv.lineage.exact_len(len(token_ids))
        key = RadixKey(token_ids[:exact_len], kv.namespace.key)
        self.space.store_prefix(
            key, kv.kv_indices[:exact_len], kv.windows, priority=kv.request.priority, counted_len=kv.stored_len
        )
        kv.stored_len = exact_len

    def _keep(self, name: Hashable, kv: RequestKV, token_ids: TokenArray) -> None:
        with self._counted(kv):
            if kv.epoch == self.space.epoch:
                exact_len = kv.lineage.exact_len(len(token_ids))
                self.space.keep(name, RadixKey(token_ids[:exact_len], kv.namespace.key), kv.kv_indices[:exact_len])

    @contextmanager
    def _counted(self, kv: RequestKV) -> Iterator[None]:
        """Log and count a failure to keep K/V for others; the request goes on."""
        try:
            yield
        except Exception:
            self._num_errors += 1
            logger.exception("K/V of request %s is not kept for others", kv.request.request_id)

    def _leaves_donors(self, request: Request, *, is_healing: bool) -> bool:
        """Whether the text of a hybrid model's request becomes a donor. Only there does it cost memory that is not shared."""
        asks = request.reuse.grafts or is_healing
        return asks and self._refusal is None and self.space.host.budget_bytes > 0

    def _begin_windows(self, kv: RequestKV) -> None:
        """Take the window slots that a graft needs, or see to it that there are some for the first rows to compute."""
        self._windows.widen(kv)
        if kv.plan.spans:
            try:
                # Drafted tokens attend from behind the prompt while it is computed again in front of them.
                is_drafted = kv.request.reuse is ReuseMode.VERIFIED
                self._windows.fill(kv, len(kv.kv_indices) if is_drafted else kv.plan.num_tokens)
            except CapacityError:
                self._give_up_graft(
                    kv, Miss(MissReason.NO_ROOM, "the graft does not fit into the window layers' slots")
                )
            else:
                return
        self._windows.require_room(kv, kv.plan.num_tokens)

    def _pin(self, kv: RequestKV) -> None:
        if kv.substitution is not None:
            return  # what stands in is no donor, and is locked already
        for donor in kv.donors:
            self.space.donors.pin(donor.donor_id)
            kv.pinned += (donor,)

    def _unpin(self, kv: RequestKV) -> None:
        for donor in kv.pinned:
            self.space.donors.unpin(donor.donor_id)
        kv.pinned = ()
        if kv.stand_in_lock is not None:
            lock, kv.stand_in_lock = kv.stand_in_lock, None
            self.space.unlock(lock)

    def _forget_reads(self, kv: RequestKV) -> None:
        if kv.reads is not None:
            kv.reads.cancel()
            kv.reads = None

    def _release(self, kv: RequestKV) -> None:
        self._forget_reads(kv)
        self._unpin(kv)
        self._windows.release(kv)
        if kv.lock is not None:
            lock, kv.lock = kv.lock, None
            self.space.unlock(lock)
        if len(kv.kv_indices):
            self.space.allocator.release(kv.kv_indices, Owner.REQUEST)
            kv.kv_indices = kv.kv_indices[:0]


@contextmanager
def _timed_graft(kv: RequestKV) -> Iterator[None]:
    """Note how long a part of the graft takes, and when the first began and the last ended."""
    started = time.perf_counter()
    try:
        yield
    finally:
        ended = time.perf_counter()
        kv.timings_ms["graft"] = kv.timings_ms.get("graft", 0.0) + (ended - started) * 1e3
        kv.moments.setdefault("graft", started)
        kv.moments["prefill"] = ended
