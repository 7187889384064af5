"""States of requests: one that their rows advance, and those that are recorded for others on the way.

A running state has read exactly the positions that were computed, in order. It begins as a copy of the state at the end of
the request's exact prefix, or empty, so that no state that others read is ever written to. What is recorded of a prompt
is copied by the pass whose rows reach it. A request that ends gives its running state itself.

What is recorded when (`kvgraft.prefix.ssm.recording` chooses the positions of the prompt):

    0 ......... prefix_len ....... branching point ......... prompt but its last token ......... answer
                copied from        copied on the way         copied on the way                   given when
                                                                                                 the request ends

Where states are recorded at multiples of a page only, an answer ends at none as a rule. There the state of the last multiple
is kept while the answer grows, one per request.

A copy for others is made only in states that running requests cannot come to need.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.engine.kv.layer_slots import LayerSlots
from kvgraft.engine.kv.state_row import StateRow
from kvgraft.errors import CapacityError
from kvgraft.prefix import RecordingPrompt, StateMatchResult

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.engine.kv.state_space import StateKVSpace
    from kvgraft.engine.kv.window_row import WindowRow
    from kvgraft.memory import StatePool
    from kvgraft.prefix import MatchResult, StateRecording

logger = logging.getLogger(__name__)


class RunningStates(LayerSlots):
    """Moves states between requests and the prefix cache. Not thread-safe.

    Invariant: the rows of a request are computed once each, in order and without a gap, with its running state.
    """

    can_rewind = False

    def __init__(self, space: StateKVSpace, pool: StatePool, recording: StateRecording, *, max_running: int) -> None:
        """Begin without requests.

        Args:
            space: Gives and takes slots.
            pool: The states' bytes.
            recording: Chooses where the states of a prompt are recorded.
            max_running: Requests that always find a state.
        """
        self._space = space
        self._pool = pool
        self._recording = recording
        self._most_recorded = space.states.num_slots - max_running
        self._num_running = 0

    def adopt(
        self, match: MatchResult | None, lock: PrefixLock | None, num_tokens: int, *, is_stored: bool, is_donor: bool
    ) -> StateRow:
        """See `LayerSlots.adopt`; the state at the end of the prefix is copied at once."""
        del is_donor  # nothing of these models is
        prefix_len = branching_len = 0
        source: int | None = None
        if match is not None:
            assert isinstance(match, StateMatchResult), "the prefix cache of these models has states"
            prefix_len, branching_len, source = match.prefix_len, match.branching_len, match.state
        running = self._space.take_state()
        try:
            self._begin(running, source, prefix_len)
        except BaseException:
            self._space.give_states_back([running])
            raise
        if source is not None:
            assert lock is not None, "the state at the end of a prefix is locked until it is copied"
            self._space.unlock_state(lock)
        self._num_running += 1
        prompt = RecordingPrompt(
            prompt_len=num_tokens,
            prefix_len=prefix_len,
            branching_len=branching_len,
            alignment=self._space.state_alignment,
        )
        due = self._recording.positions(prompt) if is_stored else []
        return StateRow(running, prefix_len, prefix_len, due, is_stored)

    def _begin(self, running: int, source: int | None, prefix_len: int) -> None:
        """Make a slot the state at the end of a prefix, `source`, or one that has read nothing."""
        if source is None:
            self._pool.clear(running)
            return
        self._pool.copy(source, running)
        assert self._pool.num_tokens(running) == prefix_len, "a state is recorded for exactly its tokens"

    def reserve(self, kv: RequestKV, positions: NDArray[np.int64]) -> int:
        """See `LayerSlots.reserve`: the pass is given slots for what it is to record."""
        row, start, stop = _row(kv), int(positions[0]), int(positions[-1]) + 1
        # Rows are prepared twice where their step was interrupted; the pass looks at what the state has read.
        assert row.num_tokens >= start == stop - len(positions), "a state reads every position once, in order"
        row.num_tokens = stop
        while row.due and row.due[0] <= stop:
            position, state = row.due.pop(0), self._spare()
            if state is not None:
                row.recorded[position] = state
                row.recorded_len = position
        return len(positions)

    def grow(self, kv: RequestKV, num_tokens: int) -> None:
        """See `LayerSlots.grow`. Where an answer ends at no multiple of a page, its last multiple is kept."""
        row = _row(kv)
        if self._space.state_alignment > 1 and self._may_record(row) and self._has_read(row):
            self._snapshot(row)
        row.num_tokens = num_tokens

    def conclude(self, kv: RequestKV, num_computed: int) -> None:
        """See `LayerSlots.conclude`: the running state itself is recorded."""
        row = _row(kv)
        if row.running is not None and row.num_tokens == num_computed and self._may_record(row):
            row.recorded[row.num_tokens], row.running = row.running, None
            row.recorded_len = row.num_tokens
            self._num_running -= 1

    def rebuild(self) -> None:
        """See `LayerSlots.rebuild`."""
        self._num_running = 0

    def release(self, row: WindowRow | StateRow | None) -> None:
        """See `LayerSlots.release`."""
        if not isinstance(row, StateRow):
            return
        self._space.give_states_back(row.held)
        self._num_running -= row.running is not None
        row.running = None
        row.recorded.clear()

    def _may_record(self, row: StateRow) -> bool:
        """Return whether the prefix cache takes a state at this position, and the request has given it none."""
        return row.is_stored and row.num_tokens > row.recorded_len and not row.num_tokens % self._space.state_alignment

    def _has_read(self, row: StateRow) -> bool:
        """Return whether the rows prepared last were computed: their step may have been interrupted."""
        return row.running is not None and self._pool.num_tokens(row.running) == row.num_tokens

    def _snapshot(self, row: StateRow) -> None:
        """Copy the running state over one that was recorded before, or into a slot of its own if there is one to spare."""
        assert row.running is not None, "a request that computes has a running state"
        state = row.recorded.popitem()[1] if row.recorded else self._spare()
        if state is None:
            return
        try:
            self._pool.copy(row.running, state)
        except Exception as error:
            self._space.doubt(error)
            self.num_errors += 1
            logger.exception("a state after %d tokens is not kept", row.num_tokens)
            self._space.give_states_back([state])
            return
        row.recorded[row.num_tokens] = state
        row.recorded_len = row.num_tokens

    def _spare(self) -> int | None:
        """Take a state that running requests cannot come to need; None if there is none."""
        if self._space.state_usage().request - self._num_running >= self._most_recorded:
            return None
        try:
            return self._space.take_state()
        except CapacityError:  # requests beside the scheduler's hold more
            return None


def _row(kv: RequestKV) -> StateRow:
    assert isinstance(kv.held.layers, StateRow), "requests of a model with states have states"
    return kv.held.layers
