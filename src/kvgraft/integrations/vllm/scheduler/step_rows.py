"""How many rows grafts and their repairs may add to one step: requests wait for a step that has room for theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvgraft.integrations.vllm.scheduler.requests import ScheduledRows, VLLMRequest
    from kvgraft.reuse.claim import Claim


class StepRows:
    """Keeps rows of steps within `VLLMConfig.rows_together`. Not thread-safe.

    vLLM runs what it has admitted in every step, so that a repair cannot be put off: it comes with the second token. What
    can be put off is the admission. A request is admitted when its gaps have room beside those of the step and the repairs
    that go out in it, and its repair beside all that are to come. When a request is repaired depends on nothing that runs
    beside it, nor does what it is answered.

    Rows of grafts for which requests wait do not count: workers compute them piece by piece, with what a step leaves.

    What reads a store is admitted at once, since no other request waits for its read. It goes on when its K/V are there and
    its repair has room (`loaded`).
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._gap_rows = 0
        self._is_full = False
        self._drawing: set[str] = set()
        self._held: dict[str, None] = {}
        self._is_computing = False

    @property
    def holds_any(self) -> bool:
        """Whether requests wait for a later call of `loaded`."""
        return bool(self._held)

    def loaded(self, request_ids: Iterable[str], states: Mapping[str, VLLMRequest]) -> set[str]:
        """Return which requests may go on now whose loads are complete; the others, the oldest first, by later calls.

        Where nothing is computed, the oldest goes on at once: those that it waits for may wait for its blocks.

        Args:
            request_ids: Those whose loads have completed since the last call.
            states: All requests.

        Complexity: O(requests).
        """
        self._held |= dict.fromkeys(sorted(request_ids))
        rows = sum(
            other.claim.num_repair_rows
            for other in states.values()
            if other.claim is not None and other.request_id not in self._held and _draws_later(other)
        )
        going: set[str] = set()
        for request_id in self._held:
            more = _rows_after_read(states.get(request_id))
            is_oldest = not going and not self._is_computing
            if not more or not rows or rows + more <= self._max_rows or is_oldest:
                going.add(request_id)
                rows += more
        for request_id in going:
            del self._held[request_id]
        return going

    def release(self) -> set[str]:
        """Return all that wait for a later call of `loaded`, and forget them."""
        held, self._held = set(self._held), {}
        return held

    def have_room_for(self, state: VLLMRequest, states: Iterable[VLLMRequest]) -> bool:
        """Return whether the step that is being scheduled can admit a request, which others must not overtake if not.

        Args:
            state: The request.
            states: All requests.

        Complexity: O(requests).
        """
        claim = state.claim
        if claim is None:
            return True
        if self._is_full and not state.is_promised and state.attempt.earlier.report is None:
            return False
        has_room = self._fits(claim, [other for other in states if other is not state])
        self._is_full = self._is_full or not has_room
        return has_room

    def admit(self, claim: Claim) -> None:
        """Note that the step that is being scheduled makes a graft."""
        self._gap_rows += 0 if claim.asynchronous else claim.num_rows

    def begin_anew(self) -> None:
        """Forget what the step has so far, and who draws tokens."""
        self._gap_rows, self._is_full = 0, False
        self._drawing.clear()
        self._is_computing = False

    def step_scheduled(self, rows: Iterable[ScheduledRows]) -> None:
        """Note what a step computes; the next admission belongs to another one."""
        self.begin_anew()
        for state, _, stop in rows:
            self._is_computing = True
            if state.claim is not None and stop >= state.claim.plan.num_tokens:
                state.is_whole = True
                self._drawing.add(state.request_id)

    def _fits(self, claim: Claim, others: Iterable[VLLMRequest]) -> bool:
        due = [(other, other.claim) for other in others if _repair_is_to_come(other)]
        # Of those that have drawn their first token: a session that ended with it waits for its next input, maybe for ever.
        rows = sum(
            known.num_repair_rows for other, known in due if known is not None and other.request_id in self._drawing
        )
        later_rows = sum(known.num_repair_rows for other, known in due if known is not None and not other.is_whole)
        if claim.num_repair_rows and later_rows and later_rows + claim.num_repair_rows > self._max_rows:
            return False
        rows += self._gap_rows
        # One that is larger than a step has it alone: `load=sync` asks for that.
        return claim.asynchronous or not rows or rows + claim.num_rows <= self._max_rows


def _draws_later(state: VLLMRequest) -> bool:
    """Return whether a request that runs has its whole prompt, and with it its repair, still before it."""
    return state.attempt.is_admitted and not state.is_whole and _repair_is_to_come(state)


def _rows_after_read(state: VLLMRequest | None) -> int:
    """Return the repair rows of a request that has read a store; 0 of others, which had room when they were admitted."""
    if state is None or state.claim is None or not state.claim.num_stored_tokens:
        return 0
    return state.claim.num_repair_rows if state.attempt.owes_repair else 0


def _repair_is_to_come(state: VLLMRequest) -> bool:
    """Return whether the repair of a request is among those that steps must have room for.

    Not while it reads a store, which may take seconds: others do not wait for that.
    """
    claim, attempt = state.claim, state.attempt
    if claim is None or not claim.repairs_after:
        return False
    if claim.num_stored_tokens and (attempt.is_copying or not attempt.is_admitted):
        return False
    return attempt.owes_repair if attempt.is_admitted else state.is_promised
