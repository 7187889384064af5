"""Reuse in one scheduler: promise what can be loaded, load it, publish what was computed, report.

`GraftRadixCache` calls this at the points where SGLang lets a cache take part. A failure is logged, counted and becomes a
miss, and the request is computed; nothing raises into the scheduler.

What a request owns and for how long:

    reading     nothing; it keeps its place in the queue until K/V of stored donors are in host memory, or for a while
    promised    nothing; matching runs again in every scheduling round
    loading     donors are pinned in the tree, for the time of the copy only
    loaded      private slots, which leave with the request's row
    finished    what it was answered from goes to the tree under a name of ours, for turns that go on from it
    retracted   nothing, but its report: the answer goes on from what was copied before
"""

from __future__ import annotations

import functools
import logging
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from kvgraft.errors import CorruptCacheError
from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.integrations.sglang.planning.spans import LoadDecision
from kvgraft.integrations.sglang.refusals import refused_copies, refused_request
from kvgraft.integrations.sglang.request_state import MatchedPrompt, RequestPhase, SGLangRequest
from kvgraft.reuse.asked import PARAMETER, REPAIR_PARAMETER, asked_mode, asked_repair
from kvgraft.reuse.continuation import may_go_on
from kvgraft.reuse.together import FailedTogetherError
from kvgraft.types import Miss, MissReason, RepairTime, ReuseMode

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvgraft.integrations.sglang.copies import Copies
    from kvgraft.integrations.sglang.donors.continuations import Continuations
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.donors.registrar import DonorRegistrar, GivenPiece, GivenText
    from kvgraft.integrations.sglang.planning.planner import LoadPlanner
    from kvgraft.integrations.sglang.planning.ranks import Ranks
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.integrations.sglang.planning.substitutes import TreeSubstitutes
    from kvgraft.integrations.sglang.repairs import Repairs
    from kvgraft.integrations.sglang.reporting.reports import RequestLog
    from kvgraft.integrations.sglang.store_use import StoreUse

logger = logging.getLogger(__name__)

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
if TYPE_CHECKING:
    _Method = Callable[Concatenate["RequestReuse", _Given], _Result]

_FIELD = "custom_params"
_STALE = "SGLang's cache may hold K/V of other weights; nothing is copied until it is emptied with /flush_cache"
_UNLIKE = "tensor-parallel ranks had different donors"
_FAILED = -2
"""In place of the tokens that a tree was given: no number of tokens."""


def _guarded(
    stage: str, instead: Callable[[], Any], *, is_read: bool = False
) -> Callable[[_Method[_Given, _Result]], _Method[_Given, _Result]]:
    """Return a decorator for what SGLang calls: a failure is counted, and the call returns `instead()`.

    Books are verified before the next call reads them. Ranks exchange nothing here. What schedulers of all ranks decide by
    alike is read (`is_read`) once more where there are several: memory may be there again, and what else fails does on all.
    """

    def decorate(method: _Method[_Given, _Result]) -> _Method[_Given, _Result]:
        @functools.wraps(method)
        def guarded(self: RequestReuse, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
            for _ in range(1 + (is_read and self.ranks.size > 1)):
                try:
                    return method(self, *given, **named)
                except Exception as error:  # noqa: BLE001 - logged and counted
                    self.log.failed(stage, "-", error)
            found: _Result = instead()
            return found

        return guarded

    return decorate


def _together(stage: str, instead: Callable[[], Any]) -> Callable[[_Method[_Given, _Result]], _Method[_Given, _Result]]:
    """Return a decorator for what ranks do together: a failure is counted on all, and the call returns `instead()` there.

    Trees of which one was used less would not evict the same: all forget their donors, and empty their trees.
    """

    def decorate(method: _Method[_Given, _Result]) -> _Method[_Given, _Result]:
        @functools.wraps(method)
        def done(self: RequestReuse, /, *given: _Given.args, **named: _Given.kwargs) -> _Result:
            try:
                return self.ranks.together(functools.partial(method, self, *given, **named))
            except Exception as error:  # noqa: BLE001 - raised again where others cannot know
                self._failed(stage, "-", error)
                self._level()
                found: _Result = instead()
                return found

        return done

    return decorate


def _nothing() -> None:
    """Return None."""


def _wait_for_load() -> None:
    """Begin nothing anew: the tree may evict in the middle of a load."""
    raise CorruptCacheError("what is evicted is not known any more, and not kept")


@dataclass(kw_only=True, eq=False)
class RequestReuse:
    """Takes every request of a scheduler through reuse. Not thread-safe. A `req` is SGLang's `Req`.

    Nothing that happens here fails a request or the scheduler: an exception is logged, counted and becomes a miss. What it
    may have left half changed is verified before it is read again; where that does not hold, all donors are forgotten.

    Requests are known as objects: ids come from clients, and one that went away may ask again under an id that is
    still on its way.

    Attributes:
        continuations: What requests go on from that accept copies.
        substitutes: Lets other texts stand in for requests that ask for it; None without a provider.
        stores: Stores that outlive this process; None for none.
        repair_time: When requests that do not say it are repaired.
        is_stale: SGLang's cache may hold K/V of other weights, so that nothing is copied or registered.
    """

    keeper: DonorKeeper
    planner: LoadPlanner
    copies: Copies
    repairs: Repairs
    registrar: DonorRegistrar
    continuations: Continuations
    ranks: Ranks
    log: RequestLog
    fingerprint: str
    substitutes: TreeSubstitutes | None = None
    stores: StoreUse | None = None
    repair_time: RepairTime = RepairTime.AFTER
    clock: Callable[[], float] = time.monotonic
    is_stale: bool = field(default=False, init=False)
    _is_empty: bool = field(default=True, init=False)
    _states: WeakKeyDictionary[Any, SGLangRequest] = field(default_factory=WeakKeyDictionary, init=False)

    @property
    def num_requests(self) -> int:
        """Requests that have been matched and have not ended."""
        return len(self._states)

    # Before admission

    def promise(
        self,
        req: Any,  # noqa: ANN401
        tokens: array[int],
        end: int,
        prefix_len: int,
        *,
        may_keep: bool = False,
    ) -> int:
        """Return how many tokens right after the exact prefix can be loaded.

        Called in every scheduling round until the request is admitted; the plan is made again only if something changed.
        Positions from `end` on are computed. With `may_keep`, donors are looked for once: `promise_again` has to follow
        before anything is loaded.
        """
        self._is_empty = False
        state = self._states.get(req)
        is_kept = may_keep and state is not None and state.is_decided
        try:
            if not is_kept:
                self.ranks.together(functools.partial(self._matched, req, tokens, end, prefix_len))
            return self._promised(req, tokens, end, prefix_len, is_kept=is_kept)
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._refuse(req, tokens, end, prefix_len, self._failed("lookup", req.rid, error))
            return 0

    def _failed(self, stage: str, rid: str, error: Exception) -> Miss:
        """Log and count what has failed on all ranks; see `RequestLog.failed`.

        Raises:
            Exception: `error`, if others cannot know: ranks have not failed together, but failed to be together.
        """
        if self.ranks.size > 1 and not isinstance(error, FailedTogetherError):
            raise error
        return self.log.failed(stage, rid, error)

    @_guarded("lookup", _nothing, is_read=True)
    def _refuse(self, req: Any, tokens: array[int], end: int, prefix_len: int, miss: Miss) -> None:  # noqa: ANN401
        state = self._states.get(req)
        if state is None:  # on one rank; the others have one by now
            state = self._states[req] = self._new(req)
        state.matched(self._prompt(req, tokens, end), prefix_len)
        state.refused(miss)
        if state.reads is not None:
            state.reads.cancel()
        if self.stores is not None:  # it waits once
            state.read_over(miss)

    def _prompt(self, req: Any, tokens: array[int], end: int) -> MatchedPrompt:  # noqa: ANN401
        return MatchedPrompt(len(tokens), min(len(tokens), len(req.origin_input_ids)), end, self.clock())

    def _matched(self, req: Any, tokens: array[int], end: int, prefix_len: int) -> None:  # noqa: ANN401
        self.settle()
        self._require_sound()
        state = self._states.get(req)
        if state is None:
            state = self._states[req] = self._new(req)
            if self.stores is not None and not self.is_stale:
                self.stores.look_after(req.rid, len(tokens))
        state.matched(self._prompt(req, tokens, end), prefix_len)
        self._decide_together(state, req, tokens)

    def _new(self, req: Any) -> SGLangRequest:  # noqa: ANN401
        return SGLangRequest(req.rid, request_namespace(self.fingerprint, req.lora_id, req.extra_key, req.cache_salt))

    @_guarded("lookup", lambda: 0, is_read=True)
    def _promised(
        self,
        req: Any,  # noqa: ANN401
        tokens: array[int],
        end: int,
        prefix_len: int,
        *,
        is_kept: bool,
    ) -> int:
        """Return what is promised now, and have it stay longest: until the request is admitted, others need room."""
        state = self._states[req]
        if is_kept:
            state.matched(self._prompt(req, tokens, end), prefix_len, is_kept=True)
        for span in state.due:
            if span.donor is not None:
                self.keeper.use(span.donor)
        return 0 if state.reads is not None else sum(span.length for span in state.adjoining(prefix_len))

    def promise_again(self, req: Any) -> int | None:  # noqa: ANN401
        """Look for donors of a request that is about to be admitted, if its last match did not.

        Returns what is promised now, or None where nothing can have changed. A queue of prompts is looked up once each, and
        once more when it is their turn, however long they wait. All ranks make the same calls.
        """
        state = self._states.get(req)
        if state is None or state.phase is not RequestPhase.STALE:
            return None
        return self.promise(req, req.full_untruncated_fill_ids, state.prompt.end, state.lineage.prefix_len)

    def _decide_together(self, state: SGLangRequest, req: Any, tokens: array[int]) -> None:  # noqa: ANN401
        mode, repair, wrong = self._asked(req)
        num_drawn = state.num_drawn
        state.planned(self.repairs.planned(repair, req.sampling_params.max_new_tokens - num_drawn, num_drawn))
        refused = (
            self._refused(req) or self._computed(req) or (None if mode.grafts else Miss(MissReason.REUSE_OFF, wrong))
        )
        if refused is not None:
            state.refused(refused)
            return
        if self.stores is not None and self.stores.is_reading(state):
            return
        self._agree(state, self._decide(state, req, mode, tokens, state.prompt.end))
        state.planned(self.repairs.planned_for(state, tokens))
        if self.stores is not None:
            self.stores.begin(state)

    @_guarded("lookup", lambda: 0, is_read=True)
    def promised(self, req: Any, prefix_len: int) -> int:  # noqa: ANN401
        """Return what was promised for the same exact prefix, without looking anything up."""
        state = self._states.get(req)
        if state is None or state.lineage.prefix_len != prefix_len:
            return 0
        return sum(span.length for span in state.adjoining(prefix_len))

    @_guarded("use of stores", lambda: False, is_read=True)
    def awaits(self, req: Any, *, may_nap: bool) -> bool:  # noqa: ANN401
        """Whether a request that was just matched is not to be admitted yet; `may_nap` waits a moment for a change."""
        state = self._states.get(req)
        if self.stores is None or state is None or state.reads is None:
            return False
        if may_nap:
            self.stores.nap(state)
        return True

    def _asked(self, req: Any) -> tuple[ReuseMode, RepairTime, str]:  # noqa: ANN401
        """Return what the request asks for in SGLang's field for parameters of plug-ins; the same on all ranks.

        What is wrong comes last; such a request reuses nothing.
        """
        given = getattr(req.sampling_params, "custom_params", None)
        params = given if isinstance(given, dict) else {}
        mode, wrong = asked_mode(params.get(PARAMETER, ReuseMode.GRAFT), _FIELD)
        repair, wrong_repair = asked_repair(params.get(REPAIR_PARAMETER, self.repair_time), _FIELD)
        return (ReuseMode.OFF if wrong_repair else mode), repair, wrong or wrong_repair

    def _refused(self, req: Any) -> Miss | None:  # noqa: ANN401
        reason = refused_request(req)
        if reason is not None:
            return Miss(MissReason.MODEL_REFUSED, reason)
        return Miss(MissReason.REUSE_OFF, _STALE) if self.is_stale else None

    def _computed(self, req: Any) -> Miss | None:  # noqa: ANN401
        reason = refused_copies(req)
        return None if reason is None else Miss(MissReason.MODEL_REFUSED, reason)

    def _decide(
        self,
        state: SGLangRequest,
        req: Any,  # noqa: ANN401
        mode: ReuseMode,
        tokens: array[int],
        end: int,
    ) -> tuple[LoadSpan, ...] | None:
        """Decide on this rank; returns the spans, or None where what was decided before still holds.

        Of a retracted request the answer so far is computed, as it was before: copies of it would be others.
        """
        prefix_len = state.lineage.prefix_len
        if state.num_drawn:
            tokens, end = tokens[: state.prompt.prompt_len], min(end, state.prompt.prompt_len - 1)
        try:
            depends_on = (self.keeper.version, self.continuations.version, len(tokens), end, prefix_len)
            if depends_on == state.decision.depends_on and all(map(self._is_there, state.adjoining(prefix_len))):
                return None
            may_read = self.stores is not None and self.stores.may_read(state)
            goes_on = None
            if may_go_on(mode) and prefix_len < end:
                goes_on = self.continuations.find(state.namespace, tokens, prefix_len, end)
            known_len = min(prefix_len, end) if goes_on is None else goes_on.end
            decision = self.planner.plan(state.namespace, tokens, known_len, end, may_read=may_read)
            if decision.miss is not None and decision.miss.reason in (MissReason.ERROR, MissReason.POLICY_ERROR):
                self.log.count_error()
            if decision.miss is not None and state.read is not None and state.read.miss is not None:
                decision = replace(decision, miss=state.read.miss)
            if self.substitutes is not None and mode is ReuseMode.SUBSTITUTE:
                decision = self._substituted(
                    self.substitutes, state, req, tokens[: end + 1], decision, known_len=known_len
                )
            if goes_on is not None:
                decision = replace(decision, spans=(goes_on, *decision.spans))
            # A lookup corrects donors that it finds shorter than they were.
            state.decided(replace(decision, depends_on=(self.keeper.version, *depends_on[1:])))
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.decided(LoadDecision(miss=self.log.failed("lookup", state.rid, error)))
        return state.decision.spans

    def _agree(self, state: SGLangRequest, spans: tuple[LoadSpan, ...] | None) -> None:
        """Have all ranks load what the first one decided; nothing where their donors differ, which are forgotten."""
        chosen = self.ranks.chosen(spans, self.keeper.digest, state.decision.goes_on)
        if not chosen.are_alike:
            self._begin_anew()
            state.refused(Miss(MissReason.ERROR, _UNLIKE))
        elif chosen.spans is not None:
            state.chosen(chosen.spans)

    def _substituted(
        self,
        substitutes: TreeSubstitutes,
        state: SGLangRequest,
        req: Any,  # noqa: ANN401
        tokens: array[int],
        decision: LoadDecision,
        *,
        known_len: int,
    ) -> LoadDecision:
        """Return the decision for another text, after `known_len` tokens, if that gains more."""
        reused_len = sum(span.length for span in decision.spans)
        found = substitutes.find(req, state.namespace, tokens, prefix_len=known_len, reused_len=reused_len)
        self.log.count_semantic(substitutes.provider.take_outcomes())
        if found is None:
            return decision
        span, source = found
        return LoadDecision((span,), None, decision.lookup_ms, source)

    def _is_there(self, span: LoadSpan) -> bool:
        return span.donor is not None and self.keeper.has(span.donor, span.donor_start, span.length)

    # Loading

    @_together("graft", lambda: 0)
    def load_first(self, req: Any, promised: int) -> int:  # noqa: ANN401
        """See `Copies.load_first`."""
        self._require_sound()
        state = self._states.get(req)
        return 0 if state is None else self.copies.load_first(state, req, promised)

    @_together("graft", _nothing)
    def load_next(self, req: Any, room: int) -> Tensor | None:  # noqa: ANN401
        """See `Copies.load_next`."""
        self._require_sound()
        state = self._states.get(req)
        return None if state is None else self.copies.load_next(state, req, room)

    def recompute(self, req: Any, slots: Tensor) -> None:  # noqa: ANN401
        """See `Repairs.loaded`. Nothing is computed by these weights over K/V of others."""
        state = self._states.get(req)
        if state is None or self.is_stale:
            return
        try:
            self.ranks.together(functools.partial(self.repairs.loaded, state, req, slots))
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._failed("recompute", req.rid, error)
            self._leave_as_copied(req)

    def _leave_as_copied(self, req: Any) -> None:  # noqa: ANN401
        """What was copied stays as approximate as it was, and waits for nothing."""
        self.repairs.drop(req)
        state = self._states.get(req)
        if state is not None:
            state.left_as_copied()

    def repairs_due(self, reqs: Sequence[Any]) -> list[Any]:
        """See `Repairs.due`.

        Where that fails they are not repaired: in a later step it would be for another token than the reports say.
        """
        try:
            if not self.repairs.waiting:
                return []
            return self.ranks.together(functools.partial(self.repairs.due, reqs))
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._failed("repair", "-", error)
            for req in reqs:
                self.repairs.drop(req)
            return []

    def repair(self, req: Any, row: Tensor) -> None:  # noqa: ANN401
        """See `Repairs.run`. Nothing is computed by these weights over K/V of others."""
        if self.is_stale:
            self.repairs.drop(req)
            return
        try:
            self.ranks.together(functools.partial(self.repairs.run, req, row))
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._failed("repair", req.rid, error)
            self._leave_as_copied(req)

    def private_slots(self, req: Any) -> list[Tensor]:  # noqa: ANN401
        """Return the slots that were loaded before the request had a row, in order."""
        state = self._states.get(req)
        return [] if state is None else state.held.private

    @_guarded("graft", _nothing, is_read=True)
    def next_gap(self, req: Any, position: int) -> int | None:  # noqa: ANN401
        """Return how many tokens to compute from `position` until the next region; None up to the end."""
        state = self._states.get(req)
        start = None if state is None else state.next_start(position)
        return None if start is None else start - position

    @_guarded("graft", _nothing, is_read=True)
    def load_first_only(self, req: Any) -> None:  # noqa: ANN401
        """Give up the regions that do not touch the exact prefix."""
        state = self._states.get(req)
        if state is not None:
            state.load_only(state.adjoining(req.prefix_len))

    @_guarded("repair", lambda: False, is_read=True)
    def is_too_much(self, req: Any, running: list[Any], num_rows: int) -> bool:  # noqa: ANN401
        """See `Repairs.is_too_much`."""
        state = self._states.get(req)
        return state is not None and self.repairs.is_too_much(state, running, num_rows)

    @_guarded("repair", lambda: 0, is_read=True)
    def rows_now(self, req: Any) -> int:  # noqa: ANN401
        """Return about how many rows are repaired in the step that admits the request."""
        state = self._states.get(req)
        is_now = state is not None and not state.repairs_after
        return self.repairs.rows(state) if state is not None and is_now else 0

    # Publishing

    @_guarded("register", _nothing)
    def published(self, req: Any, node: object) -> None:  # noqa: ANN401
        """Make donors of what `req` has given to the exact tree, once its prompt is complete."""
        state = self._states.get(req)
        if state is None or self._refused(req) is not None:
            return
        if not req.finished() and not self.registrar.is_complete(req):
            return
        try:
            self.registrar.register_exact(req, state, node)
            if req.finished() and self.substitutes is not None:
                stored = req.full_untruncated_fill_ids[: req.kv.cache_protected_len]
                self.substitutes.provider.heard(req.rid, np.frombuffer(stored[:], np.int64), state.lineage)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)
        if self.stores is not None:
            self.stores.time_prefill(state)

    @_guarded("register", _nothing)
    def settle(self) -> None:
        """Register what was published. Called after a step's output, and before donors are looked for.

        So no first token waits for it: milliseconds mostly, but 200 where the anchor table of a new server takes memory.
        A flush or new weights in between drop what is not registered yet.
        """
        if not self.keeper.num_published:
            return
        self._require_sound()
        while self.keeper.num_published:
            try:
                self.keeper.settle()
            except Exception as error:  # noqa: BLE001 - logged and counted; one text becomes no donor
                self.log.failed("register", "-", error)
        self.log.show_donors(self.keeper)

    @_together("register", _nothing)
    def adopt_computed(self, req: Any, row: Tensor, node: object) -> None:  # noqa: ANN401
        """Keep what a finished request was answered from for those that go on from it, and its exact head as a donor.

        It is about to be released; `row` are its slots by position, `node` its node in the exact tree.
        """
        self._require_sound()
        state = self._states.get(req)
        if state is None or not state.lineage.spans or state.held.adopted or self.is_stale:
            return
        try:
            req.refresh_fill_ids()
            self.registrar.register_exact(req, state, node)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)
        self.settle()  # what is known by now is not adopted a second time
        if self.repairs.due([req]):
            return  # it ended before its repair: others would go on without it
        if pieces := self.registrar.pieces(req, state):
            self._adopt(req, state, row, pieces)

    def _adopt(self, req: Any, state: SGLangRequest, row: Tensor, pieces: list[GivenPiece]) -> None:  # noqa: ANN401
        """Keep what all ranks want of `pieces`: trees that do not have the same do not evict the same."""
        texts: list[GivenText | None] = [None] * len(pieces)
        try:
            texts = self.registrar.texts(req, state, row, pieces)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)
        are_wanted = self.ranks.lowest([text is not None for text in texts])
        wanted = [text for text, is_wanted in zip(texts, are_wanted, strict=True) if text is not None and is_wanted]
        num_adopted = _FAILED
        try:
            self.registrar.adopt(state, wanted)
            num_adopted = sum(stop - start for start, stop in state.held.adopted)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)
        try:
            # After a failure as well: trees of which one is not used alike do not evict alike.
            self.registrar.touch_front(req, state)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", state.rid, error)
            num_adopted = _FAILED
        least, negated = self.ranks.lowest([num_adopted, -num_adopted])
        if least != -negated:
            self._begin_anew()
            self.registrar.empty_tree()

    def adopted(self, req: Any) -> list[tuple[int, int]]:  # noqa: ANN401
        """Return the ranges of the request's row that belong to the tree now."""
        state = self._states.get(req)
        return [] if state is None else state.held.adopted

    # The end

    def released(self, req: Any) -> None:  # noqa: ANN401
        """Take leave of a request that gave its row back: finished, aborted or retracted.

        Where that fails it has no report, also not of what follows a retraction.
        """
        state = self._states.pop(req, None)
        try:
            self.repairs.drop(req)
            if state is not None:
                self._released(req, state)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.log.failed("report", "-" if state is None else state.rid, error)
            self.repairs.drop(req)
            if state is not None and not req.finished():
                self._states[req] = state.unreported()

    def _released(self, req: Any, state: SGLangRequest) -> None:  # noqa: ANN401
        if req.finished():
            if state.is_reported:
                self.log.finished(req, state, self.planner.policy.name)
            self.log.show_donors(self.keeper)
            if self.stores is not None:
                self.log.show_stores(self.stores.link)
        else:
            if state.lineage.spans:
                req.skip_radix_cache_insert = False  # as it was; what is computed from now on may be exact
            self._states[req] = state.retracted(self.planner.policy.name)

    @_guarded("report", _nothing, is_read=True)
    def aborted(self, handle: object) -> None:
        """Forget the request of a handle, which ended before it had a row, or releases it next.

        A handle is known by identity: those of two requests of one id are equal.
        """
        for req, state in list(self._states.items()):
            if req.cache_request_handle is handle:
                del self._states[req]
                self.repairs.drop(req)
                if state.reads is not None:
                    state.reads.cancel()
                self.log.aborted(state, self.planner.policy.name)

    def evicted(self, freed: list[Tensor]) -> None:
        """Keep donors whose slots the tree has given up in host memory."""
        try:
            self._evicted(freed)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.log.failed("capture", "-", error)
            self.log.books.condemn()  # it is not known what lies where

    def _evicted(self, freed: list[Tensor]) -> None:
        if self.log.books.is_doubtful:
            self.log.books.settle(self.check, _wait_for_load)
        self.settle()
        for what, take in (("capture", self.keeper.capture), ("origins", self.continuations.forget)):
            try:
                take(freed)
            except Exception as error:  # noqa: BLE001 - logged and counted; donors are lost, or the sources of what is left
                self.log.failed(what, "-", error)

    # The scheduler

    @_together("use of stores", _nothing)
    def open_stores(self) -> None:
        """Begin to use the stores now, where the first request would do it otherwise: reading all weights takes a while."""
        if self.stores is not None and not self.is_stale:
            self.stores.look_after("-", 0)

    @_together("use of stores", _nothing)
    def idle(self) -> None:
        """Use the time of a scheduler that has nothing to compute."""
        self.settle()
        if self.stores is not None:
            self.stores.idle()

    def clear(self) -> None:
        """Begin anew after a flush, which SGLang does only while no request has K/V: later K/V are of the weights of now."""
        self._forget(weights_change=False)
        self._is_empty, self.is_stale = True, False

    def weights_change(self, *, is_between: bool | None = None) -> None:
        """Note that everything computed so far, by requests that still run too, was computed by other weights.

        SGLang's tree may keep such K/V, and requests may attend to them: nothing is copied or registered until it is flushed.

        Args:
            is_between: Whether from now on weights may change without notice, so that K/V are of unknown weights: nothing
                goes to a store or comes from one. None for no change of that.
        """
        if self.stores is not None and is_between is not None:
            self.stores.is_between = is_between
        self._forget(weights_change=True)
        if not self._is_empty and not self.is_stale:
            self.is_stale = True
            logger.warning("weights change: %s", _STALE)

    def _forget(self, *, weights_change: bool) -> None:
        """Forget all donors and all that requests go on from, and what was promised of them; once more if that fails.

        Nothing of before may be found afterwards.
        """
        try:
            self._forget_once(weights_change=weights_change)
        except Exception as error:  # noqa: BLE001 - logged and counted
            self.log.failed("forgetting donors", "-", error)
            self._forget_once(weights_change=weights_change)

    def _forget_once(self, *, weights_change: bool) -> None:
        self._forget_donors()
        if self.stores is not None:
            self.stores.close(weights_change=weights_change)

    def check(self) -> None:
        """Verify what is known of donors, and of the texts that lie in slots.

        Raises:
            CorruptCacheError: Something does not hold.
        """
        self.keeper.check()
        self.continuations.check()

    def _require_sound(self) -> None:
        """Verify the books if an error may have interrupted a change of them, and begin anew where they do not hold.

        Ranks that have others then are found to be unlike before anything is copied.

        Raises:
            Exception: They cannot begin anew yet; the next call tries again.
        """
        if self.log.books.is_doubtful:
            self.log.books.settle(self.check, self._begin_anew_here)

    def _begin_anew_here(self) -> None:
        """Forget all donors on this rank. Others have them: what was promised of them stays so, and is missed together."""
        if self.ranks.size > 1:
            self._clear()
            return
        self._forget_donors()
        if self.stores is not None:
            self.stores.link.close(weights_change=False)  # and opened again, unless stores are not used any more

    def _level(self) -> None:
        """Have all ranks forget their donors and empty their trees, where these may differ by now."""
        if self.ranks.size == 1:
            return
        try:
            self.ranks.together(self._begin_anew)
            self.registrar.empty_tree()
        except Exception as error:  # noqa: BLE001 - logged and counted; what differs is noticed with the next plan
            self.log.failed("forgetting donors", "-", error)

    def _begin_anew(self) -> None:
        """Forget all donors on all ranks: they have different ones, as where one of them failed to register a text."""
        self._forget_donors(-self.ranks.lowest([-self.keeper.next_epoch])[0])
        if self.stores is not None:
            self.stores.link.close(weights_change=False)  # and opened again, unless stores are not used any more
        logger.error("%s, and forgot them; another line of some rank's log says what failed", _UNLIKE)
        self.log.count_error()

    def _forget_donors(self, first_epoch: int = 0) -> None:
        self._clear(first_epoch)
        for state in self._states.values():
            state.forget_donors()

    def _clear(self, first_epoch: int = 0) -> None:
        self.keeper.clear(first_epoch)
        self.continuations.clear()
        self.log.books.trust()
