"""Before admission: what a request that waits in SGLang's queue is promised, in every scheduling round."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.integrations.sglang.refusals import refused_copies, refused_request
from kvgraft.integrations.sglang.requests.books import STALE, UNLIKE
from kvgraft.integrations.sglang.requests.guard import guarded, nothing
from kvgraft.integrations.sglang.requests.records import DECIDED, MatchedPrompt, RequestPhase
from kvgraft.integrations.sglang.requests.request import SGLangRequest
from kvgraft.reuse.asked import PARAMETER, REPAIR_PARAMETER, asked_mode, asked_repair
from kvgraft.types import Miss, MissReason, RepairTime, ReuseMode

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.decisions import LoadDecisions
    from kvgraft.integrations.sglang.requests.publishing import Publishing
    from kvgraft.integrations.sglang.requests.repairs import Repairs

_FIELD = "custom_params"


@dataclass(frozen=True, kw_only=True, eq=False)
class Promises:
    """Has requests looked up, and all ranks promise the same. Not thread-safe. A `req` is SGLang's `Req`.

    Attributes:
        repair_time: When requests that do not say it are repaired.
    """

    books: Books
    decisions: LoadDecisions
    repairs: Repairs
    publishing: Publishing
    fingerprint: str
    repair_time: RepairTime
    clock: Callable[[], float] = time.monotonic

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
        self.books.is_empty = False
        state = self.books.requests.get(req)
        # Nothing is called here that could fail on one rank: others would not know.
        is_kept = may_keep and state is not None and state.phase in DECIDED
        try:
            if not is_kept:
                self.books.ranks.together(functools.partial(self._matched, req, tokens, end, prefix_len))
            return self._promised(req, tokens, end, prefix_len, is_kept=is_kept)
        except Exception as error:  # noqa: BLE001 - raised again where others cannot know
            self._refuse(req, tokens, end, prefix_len, self.books.failed("lookup", req.rid, error))
            return 0

    @guarded("lookup", nothing, is_read=True)
    def _refuse(self, req: Any, tokens: array[int], end: int, prefix_len: int, miss: Miss) -> None:  # noqa: ANN401
        state = self.books.requests.get(req)
        if state is None:  # on one rank; the others have one by now
            state = self.books.requests[req] = self._new(req)
        state.matched(self._prompt(req, tokens, end), prefix_len)
        state.refused(miss)
        if state.reads is not None:
            state.reads.cancel()
        if self.books.stores is not None:  # it waits once
            state.read_over(miss)

    def _prompt(self, req: Any, tokens: array[int], end: int) -> MatchedPrompt:  # noqa: ANN401
        return MatchedPrompt(len(tokens), min(len(tokens), len(req.origin_input_ids)), end, self.clock())

    def _matched(self, req: Any, tokens: array[int], end: int, prefix_len: int) -> None:  # noqa: ANN401
        self.publishing.settle()
        self.books.require_sound()
        state = self.books.requests.get(req)
        if state is None:
            state = self.books.requests[req] = self._new(req)
            if self.books.stores is not None and not self.books.is_stale:
                self.books.stores.look_after(req.rid, len(tokens))
        state.matched(self._prompt(req, tokens, end), prefix_len)
        self._decide_together(state, req, tokens)

    def _new(self, req: Any) -> SGLangRequest:  # noqa: ANN401
        return SGLangRequest(req.rid, request_namespace(self.fingerprint, req.lora_id, req.extra_key, req.cache_salt))

    @guarded("lookup", lambda: 0, is_read=True)
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
        state = self.books.requests[req]
        if is_kept:
            state.matched(self._prompt(req, tokens, end), prefix_len, is_kept=True)
        for span in state.due:
            if span.donor is not None:
                self.books.keeper.use(span.donor)
        return 0 if state.reads is not None else sum(span.length for span in state.adjoining(prefix_len))

    def promise_again(self, req: Any) -> int | None:  # noqa: ANN401
        """Look for donors of a request that is about to be admitted, if its last match did not.

        Returns what is promised now, or None where nothing can have changed. A queue of prompts is looked up once each, and
        once more when it is their turn, however long they wait. All ranks make the same calls.
        """
        state = self.books.requests.get(req)
        if state is None or state.phase is not RequestPhase.STALE:
            return None
        return self.promise(req, req.full_untruncated_fill_ids, state.prompt.end, state.lineage.prefix_len)

    @guarded("lookup", lambda: 0, is_read=True)
    def promised(self, req: Any, prefix_len: int) -> int:  # noqa: ANN401
        """Return what was promised for the same exact prefix, without looking anything up."""
        state = self.books.requests.get(req)
        if state is None or state.lineage.prefix_len != prefix_len:
            return 0
        return sum(span.length for span in state.adjoining(prefix_len))

    @guarded("use of stores", lambda: False, is_read=True)
    def awaits(self, req: Any, *, may_nap: bool) -> bool:  # noqa: ANN401
        """Whether a request that was just matched is not to be admitted yet; `may_nap` waits a moment for a change."""
        state = self.books.requests.get(req)
        if self.books.stores is None or state is None or state.reads is None:
            return False
        if may_nap:
            self.books.stores.nap(state)
        return True

    # What all ranks decide

    def _decide_together(self, state: SGLangRequest, req: Any, tokens: array[int]) -> None:  # noqa: ANN401
        mode, repair, wrong = self._asked(req)
        sampling = req.sampling_params
        num_left, is_constrained = sampling.max_new_tokens - state.num_drawn, bool(sampling.regex or sampling.ebnf)
        state.planned(self.repairs.planned(repair, num_left, state.num_drawn, is_constrained=is_constrained))
        refused = self._refused(req) or (None if mode.grafts else Miss(MissReason.REUSE_OFF, wrong))
        if refused is not None:
            state.refused(refused)
            return
        if self.books.stores is not None and self.books.stores.is_reading(state):
            return
        self._agree(state, self.decisions.decide(state, req, mode, tokens))
        state.planned(self.repairs.planned_for(state, tokens))
        if self.books.stores is not None:
            self.books.stores.begin(state)

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
        if reason is None and self.books.is_stale:
            return Miss(MissReason.REUSE_OFF, STALE)
        reason = reason or refused_copies(req)
        return None if reason is None else Miss(MissReason.MODEL_REFUSED, reason)

    def _agree(self, state: SGLangRequest, spans: tuple[LoadSpan, ...] | None) -> None:
        """Have all ranks load what the first one decided; nothing where their donors differ, which are forgotten."""
        chosen = self.books.ranks.chosen(spans, self.books.keeper.digest, state.decision.goes_on)
        if not chosen.are_alike:
            self.books.begin_anew()
            state.refused(Miss(MissReason.ERROR, UNLIKE))
        elif chosen.spans is not None:
            state.load_only(chosen.spans)
