"""Reuse in one scheduler: promise what can be loaded, load it, publish what was computed, report.

`GraftRadixCache` calls this at the points where SGLang lets a cache take part. A failure is logged, counted and becomes a
miss, and the request is computed; nothing raises into the scheduler.

What a request owns and for how long:

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

from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.integrations.sglang.planning.ranks import Decision, Ranks
from kvgraft.integrations.sglang.recompute.recomputer import looks
from kvgraft.integrations.sglang.refusals import refused_request
from kvgraft.integrations.sglang.request_state import RequestState
from kvgraft.types import Fidelity, Miss, MissReason

if TYPE_CHECKING:
    from array import array

    from torch import Tensor

    from kvgraft.integrations.sglang.donors.library import DonorLibrary
    from kvgraft.integrations.sglang.donors.loader import Loader
    from kvgraft.integrations.sglang.donors.registrar import DonorRegistrar
    from kvgraft.integrations.sglang.planning.planner import LoadPlanner
    from kvgraft.integrations.sglang.planning.semantic import SemanticSource
    from kvgraft.integrations.sglang.planning.spans import Span
    from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
    from kvgraft.integrations.sglang.reporting.reports import RequestLog

logger = logging.getLogger(__name__)

_STALE = "SGLang's cache may hold K/V of other weights; nothing is copied until it is emptied with /flush_cache"


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
        semantic: Asked where nothing else is found; None for nobody.
        recomputer: Computes chosen tokens of what was loaded again; None where nobody does.
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
    semantic: SemanticSource | None = None
    recomputer: Recomputer | None = None
    is_stale: bool = field(default=False, init=False)
    _is_empty: bool = field(default=True, init=False)
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
        state = self._states.get(req)
        if state is None:
            namespace = request_namespace(self.fingerprint, req.lora_id, req.extra_key, req.cache_salt)
            state = self._states[req] = RequestState(req.rid, namespace)
        state.matched(len(tokens), exact_len)
        refused = self._refused(req)
        if refused is not None:
            state.spans, state.miss = [], refused
            return 0
        decision = self.ranks.decide(lambda: self._decide(state, req, tokens, end, exact_len))
        if decision.spans is not None:
            state.spans = list(decision.spans)
        return sum(span.length for span in state.adjoining(exact_len))

    def promised(self, req: Any, exact_len: int) -> int:  # noqa: ANN401
        """Return what was promised for the same exact prefix, without looking anything up."""
        state = self._states.get(req)
        if state is None or state.lineage.given_len != exact_len:
            return 0
        return sum(span.length for span in state.adjoining(exact_len))

    def _refused(self, req: Any) -> Miss | None:  # noqa: ANN401
        reason = refused_request(req)
        if reason is not None:
            return Miss(MissReason.MODEL_REFUSED, reason)
        return Miss(MissReason.REUSE_OFF, _STALE) if self.is_stale else None

    def _decide(self, state: RequestState, req: Any, tokens: array[int], end: int, exact_len: int) -> Decision:  # noqa: ANN401
        try:
            planned_for = (self.library.version, len(tokens), end, exact_len)
            if planned_for == state.planned_for and all(map(self._is_there, state.adjoining(exact_len))):
                return Decision(None)
            plan = self.planner.plan(state.namespace, tokens, exact_len, end)
            # A lookup corrects donors that it finds shorter than they were.
            state.planned_for = (self.library.version, *planned_for[1:])
            spans, state.miss, state.lookup_ms = plan.spans, plan.miss, plan.lookup_ms
            if plan.miss is not None and plan.miss.reason is MissReason.ERROR:
                self.log.count_error()
            if not spans and not exact_len and self.semantic is not None:
                spans = self.semantic.spans(req, state.namespace, tokens, end)
                state.miss = None if spans else state.miss
            return Decision(spans)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.miss = self.log.failed("lookup", state.rid, error)
            return Decision(())

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
        if state.lineage.is_approximate:
            req.skip_radix_cache_insert = True  # approximate K/V are never published
        return slots

    def recompute(self, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """Compute chosen tokens of what was loaded again; what stands behind them comes next.

        Args:
            req: SGLang's `Req`, about to be computed from `len(slots)` on.
            slots: int64, of the positions in front of that.
        """
        state, recomputer = self._states.get(req), self.recomputer
        if state is None or recomputer is None or not state.lineage.spans:
            return
        policy = recomputer.policy_for(*state.extent())
        if policy is None or (looks(policy) and state.spans):
            return  # nobody looks before the last region is there
        spans = state.take_loaded()
        if not spans or any(span.fidelity is not Fidelity.SHIFTED for span in spans):
            return
        started = time.perf_counter()
        try:
            tokens = np.frombuffer(req.full_untruncated_fill_ids[:], np.int64)
            found = recomputer.run(tokens, state.plan(len(tokens), spans), slots, policy)
            state.policy = policy.name
            state.lineage.recompute(found.computed, inside=True)
            state.num_corrected += found.corrected
        except Exception as error:  # noqa: BLE001 - logged and counted; what was copied is as approximate as before
            self.log.failed("recompute", state.rid, error)
        state.graft_ms += 1e3 * (time.perf_counter() - started)

    # Publishing

    def published(self, req: Any, node: object) -> None:  # noqa: ANN401
        """Make donors of what `req` has given to the exact tree, once its prompt is complete."""
        state = self._states.get(req)
        if state is None or self._refused(req) is not None:
            return
        if not req.finished() and not self.registrar.is_complete(req):
            return
        try:
            self.registrar.register_exact(req, state, node)
            if req.finished() and self.semantic is not None:
                self.semantic.cached(req.rid, req.full_untruncated_fill_ids[: req.kv.cache_protected_len])
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)

    def adopt_computed(self, req: Any, row: Tensor, node: object) -> None:  # noqa: ANN401
        """Keep what a finished request computed behind copies, and the exact head in front of them, as donors.

        Args:
            req: SGLang's `Req`, about to be released.
            row: Its slots by position.
            node: Its node in the exact tree.
        """
        state = self._states.get(req)
        if state is None or not state.lineage.is_approximate or state.adopted or self.is_stale:
            return
        try:
            req.refresh_fill_ids()
            self.registrar.register_exact(req, state, node)
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
                self.log.aborted(state, self.planner.policy.name)

    def evicted(self, freed: list[Tensor]) -> None:
        """Keep donors whose slots the tree has given up in host memory."""
        try:
            self.library.capture(freed)
        except Exception as error:  # noqa: BLE001 - logged and counted; the donors are lost
            self.log.failed("capture", "-", error)

    # Changes of everything

    def clear(self) -> None:
        """The cache was flushed, which SGLang does only while no request has K/V: what comes now is of today's weights."""
        self._forget()
        self._is_empty, self.is_stale = True, False

    def weights_change(self) -> None:
        """Whatever was computed so far, by a request that still runs too, was computed by other weights.

        SGLang's tree may keep such K/V, and requests may attend to them: nothing is copied or registered until it is flushed.
        """
        self._forget()
        if not self._is_empty and not self.is_stale:
            self.is_stale = True
            logger.warning("weights change: %s", _STALE)

    def _forget(self) -> None:
        """Forget all donors, and what was promised of them."""
        self.library.clear()
        for state in self._states.values():
            state.spans = []
