"""Further regions by phased prefill: compute a gap as a chunk, load the next region, go on.

SGLang's scheduler follows one unfinished prompt at a time. A phased prompt leaves most of a step's chunk budget over, which
stock scheduling never does, so this adder also decides who may use it. The queueing rule:

- One prompt is computed in pieces at a time, phased or merely long.
- Prompts that fit whole into what is left, even if nothing could be loaded for them, join its steps.
- All others keep their place in the queue; those behind them are looked at too. The head of the queue is taken up as soon as
  the piecewise prompt has its last piece, so nobody waits for more than the prompts in front.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult


@cache
def phased(adder_class: type[Any]) -> type[Any]:
    """Derive an adder that ends chunks at regions and loads these between chunks."""

    class PhasedPrefillAdder(adder_class):  # type: ignore[misc]
        """Needs a `GraftRadixCache` as `tree_cache`."""

        rem_chunk_tokens: int | None
        chunked_req_limit: int | None

        def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:  # noqa: ANN401
            """Admit a request; its first chunk ends where its next region begins."""
            budget = self.rem_chunk_tokens
            gap = None
            if budget is not None and truncation_align_size is None:
                gap = self.tree_cache.next_gap(req, req.prefix_len + req.host_hit_length)
            is_taken = has_chunked_req or self.new_chunked_req is not None
            if is_taken and self._needs_pieces(req, gap):
                return AddReqResult.CONTINUE
            if gap is None or gap >= budget:
                return super().add_one_req(req, has_chunked_req, truncation_align_size)
            self.rem_chunk_tokens = gap
            try:
                result = super().add_one_req(req, has_chunked_req, truncation_align_size)
            finally:
                self.rem_chunk_tokens += budget - gap  # what the request did not take, and what was held back
            is_admitted = bool(self.can_run_list) and self.can_run_list[-1] is req
            # The verdict was on the shortened budget.
            return self.budget_state() if is_admitted else result

        def add_chunked_req(self, req: Any) -> Any:  # noqa: ANN401
            """Go on with the prompt that is computed in pieces: load, then compute up to the next region."""
            self.tree_cache.load_between_chunks(req, int(self.rem_total_tokens))
            gap = self.tree_cache.next_gap(req, req.prefix_len)
            if gap is not None and self.rem_chunk_tokens is not None:
                limit = self.chunked_req_limit
                self.chunked_req_limit = gap if limit is None else min(limit, gap)
            return super().add_chunked_req(req)

        def _needs_pieces(self, req: Any, gap: int | None) -> bool:  # noqa: ANN401
            if self.rem_chunk_tokens is None:
                return False
            whole = self.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - req.prefix_len)
            return gap is not None or whole > self.rem_chunk_tokens

    return PhasedPrefillAdder
