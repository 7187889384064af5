"""Further regions: compute a gap as a chunk of the prompt, load the next region, go on.

SGLang's scheduler follows one unfinished prompt at a time. A phased prompt leaves most of a step's chunk budget over, which
stock scheduling never does, so this adder also decides who may use it. The queueing rule:

- One prompt is computed in pieces at a time, phased or merely long. The slots of its rest are reserved in every step.
- Prompts that fit whole into what is left, even if nothing could be loaded for them, join its steps.
- A prompt whose K/V are being read from a store keeps its place until they have come, or for a while.
- All others keep their place in the queue; those after them are looked at too. The head of the queue is taken up as soon as
  the piecewise prompt has its last piece, so that no prompt waits for more than those before it.
- While answers stream, prompts are admitted only as long as their repairs, in this step and the next one that decodes, take
  few rows together; the first one that does not fit, and those after it, wait until those before it are repaired.
- Donors are looked for when a prompt is first matched, and again when nothing else keeps it from being admitted.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar


@cache
def chunked(adder_class: type[Any]) -> type[Any]:
    """Derive from SGLang's `PrefillAdder` one that ends chunks at regions and loads these between chunks."""
    from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, AddReqResult

    fields = {
        "passed_over": AddReqResult.CONTINUE,
        "put_off": AddReqResult.OTHER,
        "most_output_tokens": CLIP_MAX_NEW_TOKENS,
    }
    return type("RegionPrefillAdder", (RegionAdmission, adder_class), fields)


class RegionAdmission:
    """Mixed into a `PrefillAdder` over a `GraftRadixCache`.

    Attributes:
        passed_over: Verdict on a request that waits while those after it are looked at.
        put_off: Verdict on a request that waits for the next step, as do those after it.
        most_output_tokens: Output of a request that SGLang reserves slots for, at most.
    """

    passed_over: ClassVar[object]
    put_off: ClassVar[object]
    most_output_tokens: ClassVar[int]
    tree_cache: Any
    memory_budget: Any
    running_batch: Any
    can_run_list: list[Any]
    new_chunked_req: Any
    rem_chunk_tokens: int | None
    rem_total_tokens: float
    chunked_req_limit: int | None
    rows_before: int = 0
    """Rows of repairs that come before the first tokens of requests admitted in this step."""

    def add_one_req(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:  # noqa: ANN401
        """Admit a request; its first chunk ends where its next region begins."""
        if self._waits(req, has_chunked_req, truncation_align_size) or (
            self.tree_cache.look_up_again(req) and self._waits(req, has_chunked_req, truncation_align_size)
        ):
            return self.passed_over
        if self.tree_cache.is_too_much(req, self.running_batch.reqs, self.rows_before):
            return self.put_off
        rows, budget, gap = self.tree_cache.rows_now(req), self.rem_chunk_tokens, self._gap(req, truncation_align_size)
        if budget is None or gap is None or gap >= budget:
            result = self._admit(req, has_chunked_req, truncation_align_size)
        else:
            result = self._admit_up_to(gap, req, has_chunked_req)
        if self._is_admitted(req):
            self.rows_before += rows
        if self.new_chunked_req is req:
            self._reserve_rest(req)
        return result

    def _is_admitted(self, req: Any) -> bool:  # noqa: ANN401
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def _waits(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> bool:  # noqa: ANN401
        """Whether a request keeps its place in the queue, by what was found for it last."""
        is_idle = not self.can_run_list and self.new_chunked_req is None and self.running_batch.is_empty()
        if self.tree_cache.awaits_store(req, may_nap=is_idle and not has_chunked_req):
            return True
        gap = self._gap(req, truncation_align_size)
        return (has_chunked_req or self.new_chunked_req is not None) and self._needs_pieces(req, gap)

    def _gap(self, req: Any, truncation_align_size: int | None) -> int | None:  # noqa: ANN401
        """Return the tokens to compute until the next region; None up to the end, or where no chunk can end there."""
        if self.rem_chunk_tokens is not None and truncation_align_size is None:
            gap: int | None = self.tree_cache.next_gap(req, req.prefix_len + req.host_hit_length)
            return gap
        self.tree_cache.load_nothing_between_chunks(req)
        return None

    def add_chunked_req(self, req: Any) -> Any:  # noqa: ANN401
        """Go on with the prompt that is computed in pieces: load, then compute up to the next region."""
        self.tree_cache.load_between_chunks(req, int(self.rem_total_tokens))
        gap = self.tree_cache.next_gap(req, req.prefix_len)
        if gap is not None and self.rem_chunk_tokens is not None:
            limit = self.chunked_req_limit
            self.chunked_req_limit = gap if limit is None else min(limit, gap)
        unfinished = super().add_chunked_req(req)  # type: ignore[misc]
        if unfinished is not None:
            self._reserve_rest(unfinished)
        return unfinished

    def _admit(self, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> Any:  # noqa: ANN401
        return super().add_one_req(req, has_chunked_req, truncation_align_size)  # type: ignore[misc]

    def _admit_up_to(self, gap: int, req: Any, has_chunked_req: bool) -> Any:  # noqa: ANN401
        """Admit a request with a chunk budget of `gap`; what is left of the whole budget stays for others."""
        assert self.rem_chunk_tokens is not None
        held_back = self.rem_chunk_tokens - gap
        self.rem_chunk_tokens = gap
        try:
            result = self._admit(req, has_chunked_req, None)
        finally:
            self.rem_chunk_tokens += held_back
        # SGLang's verdict on going on was about the shortened budget.
        return self.budget_state() if self._is_admitted(req) else result  # type: ignore[attr-defined]

    def _needs_pieces(self, req: Any, gap: int | None) -> bool:  # noqa: ANN401
        if self.rem_chunk_tokens is None:
            return False
        whole = self._whole_pages(len(req.full_untruncated_fill_ids) - req.prefix_len)
        return gap is not None or whole > self.rem_chunk_tokens

    def _reserve_rest(self, req: Any) -> None:  # noqa: ANN401
        """Reserve the slots of what `req` computes and loads in later steps.

        Stock scheduling need not: a chunk takes the whole budget of its step, and no other request is admitted.
        """
        rest = self._whole_pages(len(req.full_untruncated_fill_ids) - req.extend_end)
        output = max(0, min(req.sampling_params.max_new_tokens - len(req.output_ids), self.most_output_tokens))
        self.memory_budget.total_offset += rest + output
        self.memory_budget.current_offset += rest

    def _whole_pages(self, num_tokens: int) -> int:
        return int(self.ceil_paged_tokens(num_tokens))  # type: ignore[attr-defined]
