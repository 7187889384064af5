"""What is loaded for a request, as this rank sees it: text that it goes on from, then what a lookup finds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvgraft.integrations.sglang.planning.spans import LoadDecision
from kvgraft.reuse.continuation import may_go_on
from kvgraft.types import MissReason, ReuseMode

if TYPE_CHECKING:
    from array import array

    from kvgraft.integrations.sglang.planning.planner import LoadPlanner
    from kvgraft.integrations.sglang.planning.spans import LoadSpan
    from kvgraft.integrations.sglang.planning.substitutes import TreeSubstitutes
    from kvgraft.integrations.sglang.requests.books import Books
    from kvgraft.integrations.sglang.requests.request import SGLangRequest


@dataclass(eq=False)
class LoadDecisions:
    """Answers lookups. Not thread-safe. A `req` is SGLang's `Req`."""

    books: Books
    planner: LoadPlanner
    substitutes: TreeSubstitutes | None = None

    def decide(
        self,
        state: SGLangRequest,
        req: Any,  # noqa: ANN401
        mode: ReuseMode,
        tokens: array[int],
    ) -> tuple[LoadSpan, ...] | None:
        """Decide on this rank; returns the spans, or None where what was decided before still holds.

        Of a retracted request the answer so far is computed, as it was before: copies of it would be others.
        """
        end = state.prompt.end
        if state.num_drawn:
            tokens, end = tokens[: state.prompt.prompt_len], min(end, state.prompt.prompt_len - 1)
        try:
            versions = self.books.keeper.version, self.books.continuations.version
            depends_on = (*versions, len(tokens), end, state.lineage.prefix_len)
            if depends_on == state.decision.depends_on and self._are_there(state):
                return None
            decision = self._found(state, req, mode, tokens, end)
            # A lookup corrects donors that it finds shorter than they were.
            state.decided(replace(decision, depends_on=(self.books.keeper.version, *depends_on[1:])))
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            state.decided(LoadDecision(miss=self.books.log.failed("lookup", state.rid, error)))
        return state.decision.spans

    def _found(
        self,
        state: SGLangRequest,
        req: Any,  # noqa: ANN401
        mode: ReuseMode,
        tokens: array[int],
        end: int,
    ) -> LoadDecision:
        prefix_len = state.lineage.prefix_len
        may_read = self.books.stores is not None and self.books.stores.may_read(state)
        goes_on = None
        if may_go_on(mode) and prefix_len < end:
            goes_on = self.books.continuations.find(state.namespace, tokens, prefix_len, end)
        known_len = min(prefix_len, end) if goes_on is None else goes_on.end
        decision = self.planner.plan(state.namespace, tokens, known_len, end, may_read=may_read)
        if decision.miss is not None and decision.miss.reason in (MissReason.ERROR, MissReason.POLICY_ERROR):
            self.books.log.count_error()
        if decision.miss is not None and state.read is not None and state.read.miss is not None:
            decision = replace(decision, miss=state.read.miss)
        if self.substitutes is not None and mode is ReuseMode.SUBSTITUTE:
            decision = self._substituted(self.substitutes, state, req, tokens[: end + 1], decision, known_len=known_len)
        return decision if goes_on is None else replace(decision, spans=(goes_on, *decision.spans))

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
        self.books.log.count_semantic(substitutes.provider.take_outcomes())
        if found is None:
            return decision
        span, source = found
        return LoadDecision((span,), None, decision.lookup_ms, source)

    def _are_there(self, state: SGLangRequest) -> bool:
        return all(
            span.donor is not None and self.books.keeper.has(span.donor, span.donor_start, span.length)
            for span in state.adjoining(state.lineage.prefix_len)
        )
