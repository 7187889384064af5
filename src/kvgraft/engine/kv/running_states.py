"""States of requests: one that their rows advance, and those that are recorded for others on the way.

A state is what layers that keep one hold after a number of tokens, large or small: the sum of a text, which no part of it can
be taken from and nothing can be put into. So it is recorded whole, for the prefix of exactly its tokens, and never moved:
nothing is a donor here.

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

import numpy as np

from kvgraft.engine.kv.layer_rows import StateRow
from kvgraft.engine.kv.layer_slots import OwnSlots
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.memory import Owner
from kvgraft.prefix import HierarchicalStateCache, RecordingPrompt, StateMatchResult, StateRadixCache

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvgraft.engine.kv.host_tier import HostTier
    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.kv.layer_rows import LayerRow
    from kvgraft.engine.kv.request_kv import RequestKV
    from kvgraft.memory import SlotUsage, StatePool
    from kvgraft.prefix import EvictResult, MatchResult, StateInsertResult, StateRecording
    from kvgraft.token_key import RadixKey

logger = logging.getLogger(__name__)


class RunningStates(OwnSlots):
    """Moves states between requests and the prefix cache. Not thread-safe.

    Invariants:
        - The rows of a request are computed once each, in order and without a gap, with its running state.
        - There are no donors (verified by `check`, with those of `OwnSlots`).
        - A slot of the host tier is free or holds a state of the prefix cache (so is this).
    """

    _kind = "state"
    _prefix: StateRadixCache

    def __init__(
        self,
        space: KVSpace,
        pool: StatePool,
        recording: StateRecording,
        *,
        max_running: int,
        tier: HostTier | None = None,
    ) -> None:
        """Begin without requests.

        Args:
            space: With a prefix cache that records states, one of two tiers if `tier` is given.
            pool: The states' bytes.
            recording: Chooses where the states of a prompt are recorded.
            max_running: Requests that always find a state.
            tier: Where states of prefixes live on that leave the device; None where they are gone then.
        """
        super().__init__(space, pool.num_states, pool.bytes_per_state)
        assert isinstance(space.prefix, StateRadixCache), "states are planned for a prefix cache that knows them"
        self._pool = pool
        self._prefix = space.prefix
        self._recording = recording
        self._most_recorded = pool.num_states - max_running
        self._num_running = 0
        self._tier = tier
        self._tiered: HierarchicalStateCache | None = None
        if tier is not None:
            assert isinstance(space.prefix, HierarchicalStateCache), "a cache of two tiers"
            self._tiered = space.prefix
            tier.serve(self.allocator, self._allocate_beside_another)

    @property
    def prefix_host_bytes(self) -> int:
        """See `LayerBooks.prefix_host_bytes`."""
        return 0 if self._tiered is None else self._tiered.host_state_size * self.bytes_per_slot

    def state_usage(self) -> SlotUsage:
        """See `LayerBooks.state_usage`."""
        return self.allocator.usage()

    def allocate(self, num_states: int = 1) -> NDArray[np.int64]:
        """Give a request slots for states, with anything in them; the least valuable recorded ones leave if need be.

        Raises:
            CapacityError: Requests hold all of them.
        """
        if not self._make_room(num_states):
            raise CapacityError(
                f"running requests hold all {self.allocator.num_slots} states; wait, or raise kv_bytes or num_slots"
            )
        return self.allocator.allocate(num_states)

    def _allocate_beside_another(self, num_states: int) -> NDArray[np.int64]:
        """As `allocate`, while one is left for the request that asks: it goes on from a copy."""
        if self.available <= num_states:
            raise CapacityError("no state is left to go on from a copy")
        return self.allocate(num_states)

    def _give_back(self, states: Iterable[int]) -> None:
        self.allocator.release(_slots(states), Owner.REQUEST)

    def insert(
        self,
        key: RadixKey,
        slots: NDArray[np.int64],
        row: LayerRow | None,
        *,
        priority: int,
        counted_len: int,
    ) -> StateInsertResult:
        """See `LayerBooks.insert`; up to the last recorded state, and the cache takes over the states of the request."""
        assert isinstance(row, StateRow), "requests of these models have states"
        offered = {position: state for position, state in row.recorded.items() if position <= len(key)}
        for position, state in offered.items():
            read = self._pool.num_tokens(state)
            if read != position:
                raise CorruptCacheError(f"a state that has read {read} tokens was recorded after {position}")
        result = self._prefix.insert(key, slots, priority=priority, counted_len=counted_len, states=offered)
        returned = set(result.state_freed.tolist())
        self.allocator.transfer(_slots(set(offered.values()) - returned), Owner.REQUEST, Owner.CACHE)
        self._give_back(returned)
        for position in offered:
            del row.recorded[position]
        return result

    def rebuild(self) -> None:
        """See `LayerBooks.rebuild`."""
        if self._tier is not None:
            self._tier.slots.rebuild()
        super().rebuild()
        self._num_running = 0

    def check(self) -> None:
        """See `LayerBooks.check`."""
        super().check()
        if len(self.space.donors):
            raise CorruptCacheError("a model with states has a donor")
        if self._tier is not None and self._tiered is not None:
            self._tier.check(self._tiered.host_state_size, "states")

    def _freed(self, result: EvictResult) -> NDArray[np.int64]:
        return result.state_freed

    def _num_cached(self) -> int:
        return self._prefix.state_total_size

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
        running = int(self.allocate()[0])
        try:
            self._begin(running, source, prefix_len)
        except BaseException:
            self._give_back([running])
            raise
        if source is not None:
            assert lock is not None, "the state at the end of a prefix is locked until it is copied"
            self._prefix.dec_state_lock_only(lock.receipt)
        self._num_running += 1
        prompt = RecordingPrompt(
            prompt_len=num_tokens,
            prefix_len=prefix_len,
            branching_len=branching_len,
            alignment=self._prefix.state_alignment,
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
        if self._prefix.state_alignment > 1 and self._may_record(row) and self._has_read(row):
            self._snapshot(row)
        row.num_tokens = num_tokens

    def conclude(self, kv: RequestKV, num_computed: int) -> None:
        """See `LayerSlots.conclude`: the running state itself is recorded."""
        row = _row(kv)
        if row.running is not None and row.num_tokens == num_computed and self._may_record(row):
            row.recorded[row.num_tokens], row.running = row.running, None
            row.recorded_len = row.num_tokens
            self._num_running -= 1

    def release(self, row: LayerRow | None) -> None:
        """See `LayerSlots.release`."""
        if not isinstance(row, StateRow):
            return
        self._give_back(row.held)
        self._num_running -= row.running is not None
        row.running = None
        row.recorded.clear()

    def _may_record(self, row: StateRow) -> bool:
        """Return whether the prefix cache takes a state at this position, and the request has given it none."""
        return row.is_stored and row.num_tokens > row.recorded_len and not row.num_tokens % self._prefix.state_alignment

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
            self.space.doubt(error)
            self.num_errors += 1
            logger.exception("a state after %d tokens is not kept", row.num_tokens)
            self._give_back([state])
            return
        row.recorded[row.num_tokens] = state
        row.recorded_len = row.num_tokens

    def _spare(self) -> int | None:
        """Take a state that running requests cannot come to need; None if there is none."""
        if self.allocator.usage().request - self._num_running >= self._most_recorded:
            return None
        try:
            return int(self.allocate()[0])
        except CapacityError:  # requests beside the scheduler's hold more
            return None


def _row(kv: RequestKV) -> StateRow:
    assert isinstance(kv.held.layers, StateRow), "requests of a model with states have states"
    return kv.held.layers


def _slots(states: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(states), dtype=np.int64)
