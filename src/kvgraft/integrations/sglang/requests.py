"""Reuse in one scheduler: promise what can be loaded, load it, publish what was computed, report.

`GraftRadixCache` calls this at the points where SGLang lets a cache take part. A failure is logged, counted and becomes a
miss, and the request is computed; nothing raises into the scheduler.

What a request owns and for how long:

    reading     nothing; it keeps its place in the queue until K/V of stored donors are in host memory, or for a while
    promised    nothing; matching runs again in every scheduling round
    loading     donors are pinned in the tree, for the time of the copy only
    loaded      private slots, which leave with the request's row
    finished    computed runs behind a copy go to the tree under a name of ours, copied ones are freed
    retracted   nothing, but its report: the answer goes on from what was copied before
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from kvgraft.errors import PolicyError
from kvgraft.graft.select import NoRecompute, looks_at_query
from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.integrations.sglang.planning.ranks import Decision, Ranks
from kvgraft.integrations.sglang.refusals import refused_request
from kvgraft.integrations.sglang.request_state import RequestState
from kvgraft.reuse.asked import PARAMETER, asked_mode
from kvgraft.types import Fidelity, Miss, MissReason, ReuseMode

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from torch import Tensor

    from kvgraft.integrations.sglang.donors.library import DonorLibrary
    from kvgraft.integrations.sglang.donors.loader import Loader
    from kvgraft.integrations.sglang.donors.registrar import DonorRegistrar
    from kvgraft.integrations.sglang.planning.planner import LoadPlanner
    from kvgraft.integrations.sglang.planning.spans import Span
    from kvgraft.integrations.sglang.planning.stand_ins import StandIns
    from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.stored.link import StoreLink

logger = logging.getLogger(__name__)

_STALE = "SGLang's cache may hold K/V of other weights; nothing is copied until it is emptied with /flush_cache"

_WITHOUT_STORES = "stores are not used any more, until SGLang's cache is emptied with /flush_cache"

_SHOWN_EVERY_S = 1.0
"""How often an idle scheduler shows what stores have done; the last writes come behind the last request."""


@dataclass(kw_only=True, eq=False)
class RequestReuse:
    """Takes every request of a scheduler through reuse. Not thread-safe.

    Requests are told apart as objects: ids come from clients, and one that went away may ask again under an id that is
    still on its way.

    Attributes:
        library: Donors.
        planner: Chooses what is loaded.
        loader: Copies it.
        registrar: Makes donors of what was computed.
        ranks: Decide together.
        log: Hears what became of every request.
        fingerprint: Of the model, for namespaces.
        min_run: Shortest run that is loaded.
        stand_ins: Lets other texts stand in for requests that ask for it; None where nobody can name one.
        recomputer: Computes chosen tokens of what was loaded again; None where nobody does.
        stores: What outlives this process; None for nothing.
        clock: Seconds.
        is_stale: Whether SGLang's cache may hold K/V of other weights, so that nothing is copied or registered.
    """

    library: DonorLibrary
    planner: LoadPlanner
    loader: Loader
    registrar: DonorRegistrar
    ranks: Ranks
    log: RequestLog
    fingerprint: str
    min_run: int
    stand_ins: StandIns | None = None
    recomputer: Recomputer | None = None
    stores: StoreLink | None = None
    clock: Callable[[], float] = time.monotonic
    is_stale: bool = field(default=False, init=False)
    _is_empty: bool = field(default=True, init=False)
    _is_between: bool = field(default=False, init=False)
    _have_stores_failed: bool = field(default=False, init=False)
    _shown_at: float = field(default=float("-inf"), init=False)
    _states: WeakKeyDictionary[Any, RequestState] = field(default_factory=WeakKeyDictionary, init=False)

    @property
    def num_requests(self) -> int:
        """Requests that have been matched and have not ended."""
        return len(self._states)

    # Before admission

    def promise(self, req: Any, tokens: array[int], end: int, exact_len: int) -> int:  # noqa: ANN401
        """Return how many tokens right behind the exact prefix can be loaded.

        Called in every scheduling round until the request is admitted; the plan is made again only if something changed.

        Args:
            req: SGLang's `Req`.
            tokens: Its prompt.
            end: Positions from it on are computed.
            exact_len: Length of the exact prefix.
        """
        self._is_empty = False
        self.settle()
        state = self._states.get(req)
        if state is None:
            namespace = request_namespace(self.fingerprint, req.lora_id, req.extra_key, req.cache_salt)
            state = self._states[req] = RequestState(req.rid, namespace)
            self._look_after_stores(req.rid, len(tokens))
        state.matched(len(tokens), exact_len)
        state.matched_at = self.clock()
        mode, wrong = self._asked(req)
        refused = self._refused(req) or (None if mode.grafts else Miss(MissReason.REUSE_OFF, wrong))
        if refused is not None:
            state.spans, state.miss = [], refused
            return 0
        if self._reads(state):
            return 0
        decision = self.ranks.decide(lambda: self._decide(state, req, tokens, end, exact_len))
        if decision.spans is not None:
            state.spans = list(decision.spans)
        if self._begins_to_read(state):
            return 0
        return sum(span.length for span in state.adjoining(exact_len))

    def promised(self, req: Any, exact_len: int) -> int:  # noqa: ANN401
        """Return what was promised for the same exact prefix, without looking anything up."""
        state = self._states.get(req)
        if state is None or state.lineage.given_len != exact_len:
            return 0
        return sum(span.length for span in state.adjoining(exact_len))

    # Stores

    def idle(self) -> None:
        """The scheduler has nothing to compute right now."""
        self.settle()
        if self.stores is None:
            return
        try:
            self.stores.tick(is_idle=True)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self._stores_failed("-", error)
        if self.clock() - self._shown_at >= _SHOWN_EVERY_S:
            self._shown_at = self.clock()
            self.log.show_stores(self.stores)

    def awaits(self, req: Any, *, may_nap: bool) -> bool:  # noqa: ANN401
        """Tell whether a request that was just matched is not to be admitted yet.

        Args:
            req: SGLang's `Req`.
            may_nap: Wait a moment for that to change.
        """
        state = self._states.get(req)
        if self.stores is None or state is None or state.reads is None:
            return False
        if may_nap:
            self.stores.nap(state.reads)
        return True

    def open_stores(self) -> None:
        """Begin to use the stores now, where the first request would do it otherwise: reading all weights takes a while."""
        self._look_after_stores("-", 0)

    def _look_after_stores(self, rid: str, num_tokens: int) -> None:
        if self.stores is None or self.is_stale or self._is_between or self._have_stores_failed:
            return
        try:
            if not self.stores.is_open:
                self.stores.open()
            self.stores.tick(num_tokens)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self._stores_failed(rid, error)

    def _stores_failed(self, rid: str, error: Exception) -> Miss:
        """Do without stores from now on. It is not a store that failed, which is its own affair, but what we do with them."""
        assert self.stores is not None
        self.stores.close(weights_change=False)
        self._have_stores_failed = True
        logger.warning(_WITHOUT_STORES)
        return self.log.failed("use of stores", rid, error)

    def _reads(self, state: RequestState) -> bool:
        """Whether stored K/V are still on their way; what has arrived is at hand from now on."""
        if self.stores is None or state.reads is None:
            return False
        reads = state.reads
        try:
            is_over = self.stores.settle(reads)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            is_over, reads.miss = True, self._stores_failed(state.rid, error)
            reads.cancel()
        state.read_ms = 1e3 * (self.clock() - reads.begun)
        if not is_over:
            return True
        state.read_miss, state.reads, state.has_read, state.planned_for = reads.miss, None, True, None
        return False

    def _begins_to_read(self, state: RequestState) -> bool:
        """Begin to read what a store alone has of what was planned; the rest is planned again when it is there."""
        stored = [span for span in state.spans if span.is_stored]
        if not stored or self.stores is None:
            return False
        state.spans = []
        try:
            state.reads = self.stores.begin(stored)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.miss = state.read_miss = self._stores_failed(state.rid, error)
            state.has_read = True
            return False
        return True

    def _refused(self, req: Any) -> Miss | None:  # noqa: ANN401
        reason = refused_request(req)
        if reason is not None:
            return Miss(MissReason.MODEL_REFUSED, reason)
        return Miss(MissReason.REUSE_OFF, _STALE) if self.is_stale else None

    @staticmethod
    def _asked(req: Any) -> tuple[ReuseMode, str]:  # noqa: ANN401
        """What the request asks for in SGLang's field for parameters of plug-ins; the same on all ranks."""
        given = getattr(req.sampling_params, "custom_params", None)
        mode = given.get(PARAMETER, ReuseMode.GRAFT) if isinstance(given, dict) else ReuseMode.GRAFT
        return asked_mode(mode, "custom_params")

    def _decide(self, state: RequestState, req: Any, tokens: array[int], end: int, exact_len: int) -> Decision:  # noqa: ANN401
        try:
            planned_for = (self._version, len(tokens), end, exact_len)
            if planned_for == state.planned_for and all(map(self._is_there, state.adjoining(exact_len))):
                return Decision(None)
            # Adapters are told apart by names, which may come to mean other weights: K/V of theirs are in no store.
            may_read = self.stores is not None and not state.has_read and not state.namespace.adapter
            plan = self.planner.plan(state.namespace, tokens, exact_len, end, may_read=may_read)
            # A lookup corrects donors that it finds shorter than they were.
            state.planned_for = (self._version, *planned_for[1:])
            spans, state.miss, state.lookup_ms = (
                plan.spans,
                plan.miss and (state.read_miss or plan.miss),
                plan.lookup_ms,
            )
            if plan.miss is not None and plan.miss.reason in (MissReason.ERROR, MissReason.POLICY_ERROR):
                self.log.count_error()
            if self.stand_ins is not None and self._asked(req)[0] is ReuseMode.SUBSTITUTE:
                # Of a retracted request that has generated tokens, these are its own: no other text stands in for them.
                prompt = tokens[: min(end + 1, len(req.origin_input_ids))]
                spans = self._substituted(self.stand_ins, state, req, prompt, spans)
            return Decision(spans)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.miss = self.log.failed("lookup", state.rid, error)
            return Decision(())

    @property
    def _version(self) -> int:
        """Changes with the donors."""
        return self.library.version + (0 if self.stores is None else self.stores.cold.version)

    def _substituted(
        self,
        stand_ins: StandIns,
        state: RequestState,
        req: Any,  # noqa: ANN401
        tokens: array[int],
        spans: tuple[Span, ...],
    ) -> tuple[Span, ...]:
        """Return the span of another text if it gains more than `spans`."""
        reused_len = sum(span.length for span in spans)
        found = stand_ins.find(req, state.namespace, tokens, exact_len=state.lineage.given_len, reused_len=reused_len)
        for _ in range(stand_ins.substitutes.take_errors()):
            self.log.count_error()
        if found is None:
            return spans
        state.miss, state.substitution = None, found.source
        return (found.span,)

    def _is_there(self, span: Span) -> bool:
        return span.donor is not None and self.library.has(span.donor, span.donor_start, span.length)

    # Loading

    def load_first(self, req: Any, promised: int) -> int:  # noqa: ANN401
        """Load what touches the exact prefix, all that was promised or nothing; returns the number of tokens."""
        slots = self._load(req, promised)
        if slots is None:
            return 0
        self._states[req].private.append(slots)
        return len(slots)

    def private_slots(self, req: Any) -> list[Tensor]:  # noqa: ANN401
        """Return the slots that were loaded before the request had a row, in order."""
        state = self._states.get(req)
        return [] if state is None else state.private

    def next_gap(self, req: Any, position: int) -> int | None:  # noqa: ANN401
        """Return how many tokens to compute from `position` until the next region; None up to the end."""
        state = self._states.get(req)
        start = None if state is None else state.next_start(position)
        return None if start is None else start - position

    def load_first_only(self, req: Any) -> None:  # noqa: ANN401
        """Give up the regions that do not touch the exact prefix."""
        state = self._states.get(req)
        if state is not None:
            state.spans = state.adjoining(req.prefix_len)

    def load_next(self, req: Any, room: int) -> Tensor | None:  # noqa: ANN401
        """Load the regions that begin where the computed part ends.

        Args:
            req: SGLang's `Req`, between two chunks.
            room: Slots that may be taken without endangering running requests.

        Returns:
            The slots of the positions from `req.prefix_len` on, for the caller to write into the row; None for nothing.
        """
        state = self._states.get(req)
        if state is None:
            return None
        state.num_steps += 1
        state.pass_by(req.prefix_len, self.min_run)
        total = sum(span.length for span in state.adjoining(req.prefix_len))
        return self._load(req, total if total <= room else -1) if total else None

    def _load(self, req: Any, expected: int) -> Tensor | None:  # noqa: ANN401
        state = self._states.get(req)
        if state is None:
            return None
        slots = self.loader.load(state, req.prefix_len, expected)
        if state.lineage.spans:
            req.skip_radix_cache_insert = True  # nothing approximate is ever published, and copies belong to the row
        return slots

    def recompute(self, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute chosen tokens of what was loaded again; what stands behind them comes next.

        Args:
            req: SGLang's `Req`, about to be computed from `len(slots)` on.
            slots: int64, of the positions in front of that.
        """
        state, recomputer = self._states.get(req), self.recomputer
        if state is None or recomputer is None or not state.lineage.is_approximate:
            return
        try:
            policy = recomputer.policy_for(*state.extent())
        except PolicyError as error:
            state.take_loaded()
            self._compute_copied(recomputer, state, req, slots, error)
            return
        if policy is None or (looks_at_query(policy) and state.spans):
            return  # nobody looks before the last region is there
        spans = tuple(span for span in state.take_loaded() if span.fidelity is Fidelity.SHIFTED)
        if not spans:
            return
        started = time.perf_counter()
        try:
            tokens = np.frombuffer(req.full_untruncated_fill_ids[:], np.int64)
            found = recomputer.run(tokens, state.plan(len(tokens), spans), slots, policy)
            state.policy = policy.name
            state.lineage.recompute(found.runs)
            state.num_corrected += found.corrected
        except PolicyError as error:
            self._compute_copied(recomputer, state, req, slots, error)
        except Exception as error:  # noqa: BLE001 - logged and counted; what was copied is as approximate as before
            self.log.failed("recompute", state.rid, error)
            state.policy = NoRecompute.name
        state.recompute_ms += 1e3 * (time.perf_counter() - started)

    def _compute_copied(
        self,
        recomputer: Recomputer,
        state: RequestState,
        req: Any,  # noqa: ANN401
        slots: Tensor,
        error: PolicyError,
    ) -> None:
        """The policy failed: everything from the first copy on is computed, and nothing more is loaded.

        Where that fails, too, the request goes on with what was copied, as behind any pass that fails. It stays
        approximate: nothing of it is published, its donors have a generation, its report names its spans and policy `none`.
        """
        state.spans = []
        state.miss = self.log.failed("selection policy", state.rid, error)
        start = min(span.target_start for span in state.lineage.spans)
        try:
            recomputer.run_all(np.frombuffer(req.full_untruncated_fill_ids[:], np.int64), slots, start)
        except Exception as failure:  # noqa: BLE001 - logged and counted; what was copied is as approximate as before
            self.log.failed("recompute", state.rid, failure)
            state.policy = NoRecompute.name
        else:
            state.withdraw()

    # Publishing

    def published(self, req: Any, node: object) -> None:  # noqa: ANN401
        """Make donors of what `req` has given to the exact tree, once its prompt is complete."""
        state = self._states.get(req)
        if state is None or self._refused(req) is not None:
            return
        if not req.finished() and not self.registrar.is_complete(req):
            return
        self._time_prefill(state)
        try:
            self.registrar.register_exact(req, state, node)
            if req.finished() and self.stand_ins is not None:
                stored = req.full_untruncated_fill_ids[: req.kv.cache_protected_len]
                self.stand_ins.heard(req, stored, state.lineage)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)

    def settle(self) -> None:
        """Register what was published. Called behind a step's output, and before anyone asks what donors there are.

        So no first token waits for it: milliseconds mostly, but 200 where the anchor table of a new server takes memory.
        Whatever comes in between, a flush or new weights, drops what is not registered yet.
        """
        if not self.library.num_published:
            return
        while self.library.num_published:
            try:
                self.library.settle()
            except Exception as error:  # noqa: BLE001 - logged and counted; one text is nobody's donor
                self.log.failed("register", "-", error)
        self.log.show_donors(self.library)

    def _time_prefill(self, state: RequestState) -> None:
        """A prompt that was computed behind an exact prefix alone tells how long computing takes."""
        if self.stores is None or state.is_timed:
            return
        state.is_timed = True
        first = state.lineage.given_len
        cost = self.stores.costs.compute_cost(first, state.num_tokens)
        self.stores.prefill.observe(state.num_tokens - first, cost, self.clock() - state.matched_at)

    def adopt_computed(self, req: Any, row: Tensor, node: object) -> None:  # noqa: ANN401
        """Keep what a finished request computed behind copies, and the exact head in front of them, as donors.

        Args:
            req: SGLang's `Req`, about to be released.
            row: Its slots by position.
            node: Its node in the exact tree.
        """
        state = self._states.get(req)
        if state is None or not state.lineage.spans or state.adopted or self.is_stale:
            return
        try:
            req.refresh_fill_ids()
            self.registrar.register_exact(req, state, node)
            self.settle()  # what is known by now is not adopted a second time
            self.registrar.adopt_computed(req, state, row)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)

    def adopted(self, req: Any) -> list[tuple[int, int]]:  # noqa: ANN401
        """Return the ranges of the request's row that belong to the tree now."""
        state = self._states.get(req)
        return [] if state is None else state.adopted

    # The end

    def released(self, req: Any) -> None:  # noqa: ANN401
        """The request gave its row back: finished, aborted or retracted."""
        state = self._states.pop(req, None)
        if state is None:
            return
        if req.finished():
            self.log.finished(req, state, self.planner.policy.name)
            self.log.show_donors(self.library)
            if self.stores is not None:
                self.log.show_stores(self.stores)
        else:
            attempts = (*state.attempts, state.attempt(self.planner.policy.name))
            self._states[req] = RequestState(state.rid, state.namespace, attempts)

    def aborted(self, handle: object) -> None:
        """The request of a handle ended before it had a row, or its row is released next.

        A handle is told by identity: those of two requests of one id are equal.
        """
        for req, state in list(self._states.items()):
            if req.cache_request_handle is handle:
                del self._states[req]
                if state.reads is not None:
                    state.reads.cancel()
                self.log.aborted(state, self.planner.policy.name)

    def evicted(self, freed: list[Tensor]) -> None:
        """Keep donors whose slots the tree has given up in host memory."""
        self.settle()
        try:
            self.library.capture(freed)
        except Exception as error:  # noqa: BLE001 - logged and counted; the donors are lost
            self.log.failed("capture", "-", error)

    # Changes of everything

    def clear(self) -> None:
        """The cache was flushed, which SGLang does only while no request has K/V: what comes now is of today's weights."""
        self._forget()
        self._is_empty, self.is_stale = True, False
        if self.stores is not None:
            self.stores.close(weights_change=False)

    def weights_change(self, *, is_between: bool | None = None) -> None:
        """Whatever was computed so far, by a request that still runs too, was computed by other weights.

        SGLang's tree may keep such K/V, and requests may attend to them: nothing is copied or registered until it is flushed.

        Args:
            is_between: Whether from now on weights may change without our being told, so that nobody can say whose K/V there
                are: nothing goes to a store or comes from one. None for no change of that.
        """
        self._forget()
        if is_between is not None:
            self._is_between = is_between
        if self.stores is not None:
            self.stores.close(weights_change=True)
        if not self._is_empty and not self.is_stale:
            self.is_stale = True
            logger.warning("weights change: %s", _STALE)

    def _forget(self) -> None:
        """Forget all donors, and what was promised of them."""
        self.library.clear()
        self.planner.reset()
        self._have_stores_failed = False
        for state in self._states.values():
            state.spans, state.reads = [], None
