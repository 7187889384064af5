"""The K/V side of a request's life: match, decide, hold, allocate; graft; grow; publish prefixes and donors; release."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.kv.grafting import Grafting
from kvgraft.engine.kv.holdings import Holdings
from kvgraft.engine.kv.request_kv import RequestKV
from kvgraft.errors import CapacityError, ConfigError
from kvgraft.graft.select import NoRecompute
from kvgraft.graft.sparse_prefill import AnswerFirst, SparsePrefill
from kvgraft.graft.steps import GraftSteps, Scope
from kvgraft.memory import Owner
from kvgraft.prefix import StoredLength
from kvgraft.reuse.continuation import continuation_key
from kvgraft.reuse.failures import miss_of
from kvgraft.reuse.lineage import Lineage
from kvgraft.token_key import RadixKey, UnannouncedKey
from kvgraft.types import Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.kv_space import KVSpace, StoredContinuation
    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.engine.kv.layer_slots import LayerSlots
    from kvgraft.engine.kv.planning import Planner
    from kvgraft.engine.kv.request_donors import RequestDonors
    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.engine.requests.request import Request
    from kvgraft.errors import PolicyError
    from kvgraft.prefix import MatchResult
    from kvgraft.reuse.lookup import ProposerCounters
    from kvgraft.types import DonorId, Namespace, TokenArray

logger = logging.getLogger(__name__)


class CacheManager:
    """Takes requests through the cache. Every `begin` is followed by exactly one `finish` or `abort`. Not thread-safe.

    A failure while looking up or grafting is logged, counted in `num_errors` and becomes a miss; the request goes on.
    """

    def __init__(
        self,
        adapter: TransformersAdapter,
        space: KVSpace,
        layers: LayerSlots,
        request_donors: RequestDonors,
        planner: Planner,
    ) -> None:
        self.space = space
        self.flops = planner.flops
        self._num_errors = 0
        self._top_generation = 0  # of what requests go on from; a setting may allow for more than anything has
        self._adapter = adapter
        self._lengths = adapter.lengths
        self._layers = layers
        self._request_donors = request_donors
        self._planner = planner
        self._grafting = Grafting(adapter, space, planner.flops)
        self._substitutes = planner.substitutes

    @property
    def proposals(self) -> ProposerCounters:
        """Donors that a proposer named, and what they added."""
        return self._planner.lookup.proposals

    def semantic_calls(self) -> dict[str, int]:
        """Return the calls of a semantic provider, by outcome; empty without one."""
        return {} if self._substitutes is None else self._substitutes.outcomes()

    @property
    def num_errors(self) -> int:
        """Lookups, transfers, grafts, publications and calls of a semantic provider that failed and became misses."""
        parts = (self._layers, self._planner, self.space, self._grafting)
        return self._num_errors + sum(part.num_errors for part in parts)

    def begin(
        self,
        request: Request,
        *,
        headroom: int = 0,
        stop: int | None = None,
        stored_len: int = 0,
        leaves_trace: bool = True,
        goes_on: bool | None = None,
    ) -> RequestKV:
        """Match, decide, hold and allocate the prompt's slots and `headroom` more.

        Args:
            request: Of the attempt.
            headroom: Slots besides.
            stop: Begin with the positions before it alone, which are computed and kept for others under any reuse mode: a
                piece of a text that heals. None for the whole prompt.
            stored_len: See `RequestKV`.
            leaves_trace: Others may reuse what it computes: it is published. Nothing is recorded for them otherwise.
            goes_on: Whether it takes approximate K/V that an earlier request, or attempt, has left in their places; None to
                do so if its reuse mode does.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request holds nothing.
        """
        started = time.perf_counter()
        epoch = self.space.epoch
        namespace = self._lengths.namespace(request.namespace, len(request.token_ids))
        num_tokens = len(request.token_ids[:stop])
        held = Holdings(self.space, np.empty(0, np.int64), None)
        try:
            match, lineage = self._hold_prefix(request, held, namespace, stop, goes_on=goes_on)
            is_donor = leaves_trace and self._leaves_donors(request, is_healing=stop is not None)
            adopt = partial(self._layers.adopt, num_tokens=num_tokens, is_stored=leaves_trace, is_donor=is_donor)
            held.layers = self._adopted(request, held, match, adopt)
            prefix_len = len(held.kv_indices)
            lineage = lineage if prefix_len else Lineage(0)
            decision = self._planner.decide(request, namespace, num_tokens, prefix_len, goes_on=lineage.is_approximate)
            kv = RequestKV(
                request,
                namespace,
                epoch,
                lineage,
                decision,
                held,
                timings_ms={"lookup": (time.perf_counter() - started) * 1e3},
                moments={"lookup": started},
                # The use of the request that is healed counts, and no other.
                stored_len=stored_len if stop is None else prefix_len,
            )
            held.keep(decision.donors)
            fresh = self._allocate_prompt(kv, headroom)
            held.kv_indices = np.concatenate([held.kv_indices, fresh])
            self._begin_windows(kv)
            if request.reuse is ReuseMode.VERIFIED:
                kv.draft_room = self._draft_room(kv)
        except BaseException:
            self._release(held)
            raise
        return kv

    def reset(self) -> None:
        """Drop all prefixes and donors; see `KVSpace.reset`."""
        self.space.reset()

    def rebuild(self) -> None:
        """Begin anew with everything empty, without a look at what may be half changed; see `KVSpace.rebuild`."""
        self.space.rebuild()

    def look(self, request: Request) -> StoredLength:
        """Return how much of the request's prompt the prefix cache has, its last token included; nothing where it fails.

        Moves nothing.
        """
        namespace = self._lengths.namespace(request.namespace, len(request.token_ids))
        try:
            return self.space.prefix.look(RadixKey(request.token_ids, namespace.key))
        except Exception as error:
            self.space.doubt(error)
            self._num_errors += 1
            logger.exception("the prefix cache cannot be asked what it has of request %s", request.request_id)
            return StoredLength(0)

    def retire(self, donor_ids: Iterable[DonorId]) -> list[DonorId]:
        """See `RequestDonors.retire`."""
        return self._request_donors.retire(donor_ids)

    def join(self, kv: RequestKV, made: Iterable[DonorId]) -> None:
        """Let the donors that were made of a text before and those of its last piece be one; stores are offered that.

        Args:
            kv: Of the last piece, published.
            made: Donors made of the pieces before it; some may be gone.
        """
        with self._counted(kv):
            kv.made = self._request_donors.join([*made, *kv.made])
            self._grafting.names.note(kv.request, kv.made)

    def _hold_prefix(
        self, request: Request, held: Holdings, namespace: Namespace, stop: int | None, *, goes_on: bool | None
    ) -> tuple[MatchResult | None, Lineage]:
        """Lock and hold what there is of a text that begins: its exact prefix, then what it goes on from.

        The match is that of what is held at the end of it; None where nothing is looked for, or looking fails.
        """
        # The last token is always computed: its logits are what the request is for.
        token_ids = request.token_ids[:stop][:-1]
        match, lineage = None, Lineage(0)
        if request.reuse is not ReuseMode.OFF:
            match = self._extended(request, held, RadixKey(token_ids, namespace.key))
            lineage = Lineage(len(held.kv_indices))
        if goes_on is None:
            goes_on = stop is None and self._planner.may_go_on(request)
        if goes_on:
            known = self._longest_continuation(request, namespace, token_ids)
            if known is not None and known.length > len(held.kv_indices):
                key = _continuation_of(token_ids, namespace, known.generation)
                match = self._extended(request, held, key) or match
                lineage.go_on(len(held.kv_indices), known.generation)
        return match, lineage

    def _extended(self, request: Request, held: Holdings, key: RadixKey) -> MatchResult | None:
        """Hold what is stored of a key beyond what is held, under its lock alone; None where there is nothing more."""
        found = self._locked_match(request, key)
        if found is None:
            return None
        match, lock = found
        try:
            slots, start = match.kv_indices, len(held.kv_indices)
            if request.session is not None:
                slots = np.concatenate([slots, self.space.tail_behind(request.session.name, key, match)])
            more = slots[start:]
            joined = np.concatenate([held.kv_indices, more])
            is_longer = len(more) > 0 or not start
            if is_longer:
                self.space.allocator.retain(more, Owner.REQUEST)
        except BaseException:
            self.space.unlock(lock)
            raise
        if not is_longer:
            self.space.unlock(lock)
            return None
        before, held.lock, held.kv_indices = held.lock, lock, joined
        if before is not None:
            self.space.unlock(before)  # the slots are the request's as well; a lock keeps the path to them
        return match

    def _longest_continuation(
        self, request: Request, namespace: Namespace, token_ids: TokenArray
    ) -> StoredContinuation | None:
        """Return the longest stored text that a request may go on from, of equal ones the least often copied."""
        try:
            return self.space.longest_continuation(
                (generation, _continuation_of(token_ids, namespace, generation))
                for generation in range(1, self._top_generation + 1)
            )
        except Exception as error:
            self.space.doubt(error)
            self._num_errors += 1
            logger.exception("the prefix cache cannot be asked what request %s goes on from", request.request_id)
            return None

    def _locked_match(self, request: Request, key: RadixKey) -> tuple[MatchResult, PrefixLock] | None:
        """Find and lock a stored prefix; None where the prefix cache, which may be another package's, fails."""
        try:
            match = self.space.match(key)
            return match, self.space.lock(match.handle)
        except Exception as error:
            self.space.doubt(error)
            self._num_errors += 1
            logger.exception("the prefix cache failed on request %s; its prefix is computed", request.request_id)
            return None

    def _adopted(
        self,
        request: Request,
        held: Holdings,
        match: MatchResult | None,
        adopt: Callable[..., LayerRow | None],
    ) -> LayerRow | None:
        """Begin with what `held` has of the prefix; where that fails, as where its state is not copied, without a prefix."""
        try:
            return adopt(match, held.lock)
        except CapacityError:
            raise
        except Exception as error:
            self.space.doubt(error)
            if match is None:
                raise
            self._num_errors += 1
            logger.exception("request %s cannot go on from its prefix, which is computed", request.request_id)
        held.release()
        return adopt(None, None)

    def graft(self, kv: RequestKV) -> None:
        """Copy the plan's spans into the request's slots and unpin their donors. A failure becomes a miss.

        Where spans come from a store (`kv.held.reads`), `load` is called until it returns True.
        """
        with self._attempt(kv):
            self._grafting.begin_reads(kv)
            self._grafting.copy_resident(kv)
            if kv.held.reads is None:
                self._grafting.note(kv)
        if kv.held.reads is None:
            kv.held.release_donors()

    def load(self, kv: RequestKV) -> bool:
        """Copy what has come from stores since the last call; True when the prompt can be computed. Never waits."""
        reads, stores = kv.held.reads, self.space.stores
        if reads is None or stores is None:
            return True
        with self._attempt(kv):
            if not self._grafting.copy_arrived(kv, reads, stores):
                return False
            kv.timings_ms["read"] = reads.elapsed_ms
            lost = [span.match for span in reads.spans if not span.is_copied]
            if lost:
                from kvgraft.reuse.reads import store_miss  # loaded with the stores

                miss = store_miss(span.state for span in reads.spans)
                kv.decision = self._planner.without(kv.request, kv.decision, lost, miss)
            self._grafting.note(kv)
        kv.held.release_donors()
        with self._counted(kv):
            stores.used(reads)
        return True

    def prefill(self, kv: RequestKV) -> SparsePrefill:
        """Return the prefill of the request's prompt; its reused K/V lie in their slots.

        Where the policy fails, now or later, the decision becomes a miss at once: what is about to be computed in full is
        not reported as grafted.
        """
        decision = kv.decision
        steps = GraftSteps(
            decision.plan,
            decision.policy if decision.policy is not None and decision.plan.has_shifted else NoRecompute(),
            token_ids=kv.request.token_ids,
            correction=decision.correction,
            scope=Scope(num_layers=self._adapter.num_layers),
        )
        prefill = AnswerFirst if kv.repairs_after else SparsePrefill
        return prefill(
            kv.request.token_ids,
            kv.kv_indices,
            steps,
            swa_indices=kv.swa_indices,
            state=kv.state,
            snapshots=kv.snapshots,
            on_policy_error=lambda error: self._policy_failed(kv, error),
        )

    def _policy_failed(self, kv: RequestKV, error: PolicyError) -> None:
        miss = self._planner.policy_failed(kv.request, error)
        if not kv.is_answered:
            self._give_up(kv, miss)

    def settle(self, kv: RequestKV) -> None:
        """Load the spans of the plan, and wait for them as long as a request may. For callers that run nothing else."""
        while not self.load(kv):
            assert kv.held.reads is not None
            kv.held.reads.wait(1.0)

    @contextmanager
    def _attempt(self, kv: RequestKV) -> Iterator[None]:
        """Turn the decision into a miss where copying fails."""
        with _timed_graft(kv):
            try:
                yield
            except Exception as error:
                self.space.doubt(error)
                self._num_errors += 1
                logger.exception("graft of request %s failed; it is computed instead", kv.request.request_id)
                self._give_up(kv, miss_of(error))

    def grow(self, kv: RequestKV, num_tokens: int, *, headroom: int = 0) -> None:
        """Give `num_tokens` positions slots, and up to `headroom` more where any are missing.

        Raises:
            CapacityError: There are not enough slots, even after eviction; the request keeps what it has.
        """
        missing = num_tokens - len(kv.kv_indices)
        if missing > 0:
            after = int(kv.kv_indices[-1])
            count = min(missing + headroom, max(missing, self.space.available))
            slots = self.space.allocate(count, after=after)
            kv.held.kv_indices = np.concatenate([kv.kv_indices, slots])
            self._layers.widen(kv)
        self._layers.grow(kv, num_tokens)

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """Prepare to compute prompt rows at `positions`; returns how many of them can be computed now, maybe none.

        All of them, unless window layers have slots of their own and these are short.
        """
        return self._layers.reserve(kv, positions)

    def outgrows(self, kv: RequestKV, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` needs other angles than its K/V have, and must begin again."""
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
        """Rows of a sequence that can be computed in one piece whenever it runs alone; None for any number."""
        return self._layers.longest_piece

    @property
    def can_rewind(self) -> bool:
        """Whether positions of a request that were computed can be computed again."""
        return self._layers.can_rewind

    def publish(self, kv: RequestKV, token_ids: TokenArray, *, is_settled: bool = True) -> None:
        """Let others reuse what the request has: exact K/V as prefixes, the others to go on from, what it computed as donors.

        May be called again when there is more. A failure is logged and counted; the request is not harmed by it. Nothing is
        kept of a request that began before a reset: its K/V may be of other weights.

        Args:
            kv: As `begin` returned it.
            token_ids: Tokens of the positions that have K/V: the prompt, then all generated tokens but the last.
            is_settled: Whether its repair, if one was due, is done: others would go on without it.
        """
        with self._counted(kv):
            if kv.epoch == self.space.epoch:
                self._publish_prefix(kv, token_ids)
                if is_settled:
                    self._publish_continuation(kv, token_ids)
                self._request_donors.register(kv, token_ids)
                self._grafting.names.note(kv.request, kv.made)
        self._layers.advance(kv, len(token_ids))

    def finish(
        self, kv: RequestKV, token_ids: TokenArray, *, keep_as: Hashable = None, is_settled: bool = True
    ) -> None:
        """Publish and release the request; keep what was published from eviction for the session `keep_as`, if there is one.

        `is_settled` is as `publish` takes it.
        """
        try:
            self._layers.conclude(kv, len(token_ids))
            self.publish(kv, token_ids, is_settled=is_settled)
            if keep_as is not None:
                self._keep(keep_as, kv, token_ids, is_settled=is_settled)
            if self._substitutes is not None and kv.epoch == self.space.epoch:
                with self._counted(kv):
                    self._substitutes.heard(kv.request.request_id, token_ids, kv.lineage)
        finally:
            self._offer(kv)
            self._release(kv.held)

    def close(self) -> None:
        """Let the semantic provider, if there is one, give back its resources."""
        if self._substitutes is not None:
            self._substitutes.close()

    def suspend(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Release a request that will be begun again; what it has stays cached while there is room, for itself too.

        A failure to store it is logged and counted; the request is computed again from its beginning then.
        """
        try:
            with self._counted(kv):
                if kv.epoch == self.space.epoch:
                    self._layers.conclude(kv, len(token_ids))
                    self._publish_prefix(kv, token_ids)
                    self._publish_continuation(kv, token_ids)
        finally:
            self._release(kv.held)

    def heal(self, kv: RequestKV, token_ids: TokenArray, donor_ids: Sequence[DonorId]) -> list[DonorId]:
        """Publish the exact K/V of a beginning and release its request; approximate donors that lie in it become exact ones.

        Nothing else of it becomes a donor: its text has had donors since it was answered.

        Args:
            kv: Of the beginning.
            token_ids: Of the positions that have K/V.
            donor_ids: Donors of generation > 0 that were made of the whole text; those that stay for now are returned.

        Raises:
            Exception: What failed; `abort` gives everything back then.
        """
        self._publish_prefix(kv, token_ids)
        left = self._request_donors.heal(kv, token_ids, donor_ids)
        self._grafting.names.note(kv.request, kv.made)
        self._offer(kv)
        self._release(kv.held)
        return left

    def abort(self, kv: RequestKV) -> None:
        """Release the request; nothing is kept but what it has published."""
        self._offer(kv)
        self._release(kv.held)

    def _offer(self, kv: RequestKV) -> None:
        """Have stores given what donors were made of the request: once, when it ends, however often it published."""
        if self.space.stores is not None and kv.made:
            with self._counted(kv):
                self.space.stores.writes.offer(kv.made)

    def _allocate_prompt(self, kv: RequestKV, headroom: int) -> NDArray[np.int64]:
        """Allocate slots after the prefix. Where the donors themselves take the room, the prompt is computed instead."""
        num_tokens = kv.plan.num_tokens - len(kv.kv_indices) + headroom
        after = int(kv.kv_indices[-1]) if len(kv.kv_indices) else None
        try:
            return self.space.allocate(num_tokens, after=after)
        except CapacityError:
            if not kv.held.has_donors or num_tokens > self.space.available:
                raise
            self._give_up(kv, Miss(MissReason.NO_ROOM, "prompt and donors do not fit into the pool together"))
            return self.space.allocate(num_tokens, after=after)

    def _draft_room(self, kv: RequestKV) -> int:
        """Return the number of positions after the prompt that have slots and the angles of the prompt."""
        num_tokens, switch = kv.plan.num_tokens, self._lengths.switch
        end = len(kv.kv_indices)
        if switch is not None and not self._lengths.is_long(num_tokens):
            end = min(end, switch)
        return end - num_tokens

    def _give_up(self, kv: RequestKV, miss: Miss) -> None:
        """Replace a decision that cannot be carried out by a miss: everything after the prefix is computed."""
        kv.held.release_donors()
        kv.lineage.withdraw(kv.plan.prefix_len)
        kv.decision = kv.decision.given_up(miss)

    def _publish_prefix(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Give the prefix cache what a full prefill would have computed too: everything before the first graft."""
        if kv.windows is not None and kv.lineage.goes_on:
            return  # its windows, those before the end of the exact prefix too, are of what it goes on from
        exact_len = kv.lineage.exact_len(len(token_ids))
        key = RadixKey(token_ids[:exact_len], kv.namespace.key)
        self.space.store_prefix(
            key, kv.kv_indices[:exact_len], kv.held.layers, priority=kv.request.priority, counted_len=kv.stored_len
        )
        kv.stored_len = max(kv.stored_len, exact_len)

    def _publish_continuation(self, kv: RequestKV, token_ids: TokenArray) -> None:
        """Store all that the request was answered from, under a name that requests look for which accept copies.

        The slots are shared with the exact prefix, and with all that go on from them: they are written no more.
        """
        key = self._continuation(kv, token_ids)
        if key is not None:
            self._top_generation = max(self._top_generation, kv.lineage.generation_at(len(key)))
            self.space.store_prefix(
                key,
                kv.kv_indices[: len(key)],
                kv.held.layers,
                priority=kv.request.priority,
                counted_len=kv.continued_len,
            )
            kv.continued_len = max(kv.continued_len, len(key))

    def _continuation(self, kv: RequestKV, token_ids: TokenArray) -> RadixKey | None:
        """Return the key of what others may go on from; None where all of that is exact."""
        stop = kv.lineage.own_len(len(token_ids))
        generation = kv.lineage.generation_at(stop)
        if not generation:
            return None
        return _continuation_of(token_ids[:stop], kv.namespace, generation)

    def _keep(self, name: Hashable, kv: RequestKV, token_ids: TokenArray, *, is_settled: bool) -> None:
        with self._counted(kv):
            if kv.epoch == self.space.epoch:
                exact = RadixKey(token_ids[: kv.lineage.exact_len(len(token_ids))], kv.namespace.key)
                key = (self._continuation(kv, token_ids) if is_settled else None) or exact
                self.space.keep(name, key, kv.kv_indices[: len(key)])

    @contextmanager
    def _counted(self, kv: RequestKV) -> Iterator[None]:
        """Log and count a failure to keep K/V for others; the request goes on."""
        try:
            yield
        except Exception as error:
            self.space.doubt(error)
            self._num_errors += 1
            logger.exception("K/V of request %s is not kept for others", kv.request.request_id)

    def _leaves_donors(self, request: Request, *, is_healing: bool) -> bool:
        """Return whether the text of a hybrid model's request becomes a donor. Only there it costs memory of its own."""
        asks = request.reuse.grafts or is_healing
        return asks and self._planner.refusal is None and self.space.host.budget_bytes > 0

    def _begin_windows(self, kv: RequestKV) -> None:
        """Take the window slots that a graft needs, or see to it that there are some for the first rows to compute."""
        self._layers.widen(kv)
        if kv.plan.spans:
            try:
                # Drafted tokens, and the row that a repair has beside it, attend to positions that are computed again. A
                # graft that waits for its repair need not wait any more once a store has lost a part of it.
                goes_on = kv.request.reuse is ReuseMode.VERIFIED or kv.request.repairs_after
                self._layers.fill(kv, len(kv.kv_indices) if goes_on else kv.plan.num_tokens)
            except CapacityError:
                self._give_up(kv, Miss(MissReason.NO_ROOM, "the graft does not fit into the window layers' slots"))
            else:
                return
        self._layers.require_room(kv, kv.plan.num_tokens)

    def _release(self, held: Holdings) -> None:
        self._layers.release(held.layers)
        held.release()


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


def _continuation_of(token_ids: TokenArray, namespace: Namespace, generation: int) -> RadixKey:
    """Return the key of text that requests go on from; KV events speak of what is exact alone."""
    return RadixKey(token_ids, UnannouncedKey(continuation_key(namespace, generation)))
