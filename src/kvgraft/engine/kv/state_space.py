"""All K/V of an engine with layers that keep states: slots of tokens, slots of states, one prefix tree over both.

A state is what such layers hold after a number of tokens, large or small: the sum of a text, which no part of it can
be taken from and nothing can be put into. So it is recorded whole, for the prefix of exactly its tokens, and never moved:
nothing is a donor here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine.kv.kv_space import KVSpace
from kvgraft.engine.kv.state_row import StateRow
from kvgraft.errors import CapacityError, CorruptCacheError
from kvgraft.memory import Owner, SlotAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from kvgraft.engine.kv.kept_prefixes import PrefixLock
    from kvgraft.engine.kv.window_row import WindowRow
    from kvgraft.memory import SlotPool, SlotUsage, StatePool
    from kvgraft.prefix import EvictResult, StateRadixCache
    from kvgraft.token_key import RadixKey


class StateKVSpace(KVSpace):
    """Owns both allocators and the prefix cache. Not thread-safe.

    Attributes:
        states: Holders of slots of states, as `allocator` of those of tokens.

    Invariants (verified by `check`), besides those of `KVSpace`:
        - `free + cached + request == total` of states, too.
        - The states with a CACHE reference are exactly those of the prefix cache.
        - There are no donors.
    """

    _keeps_tails = False  # a session goes on from a state, and none is recorded behind whole pages

    def __init__(
        self,
        pool: SlotPool,
        states: StatePool,
        prefix: StateRadixCache,
        *,
        host_bytes: int,
        donor_tokens: int,
        min_run: int,
    ) -> None:
        super().__init__(pool, prefix, host_bytes=host_bytes, donor_tokens=donor_tokens, min_run=min_run)
        self.states = SlotAllocator(states.num_states)
        self._state_pool = states
        self._prefix = prefix

    @property
    def state_alignment(self) -> int:
        """States are recorded after multiples of so many tokens."""
        return self._prefix.state_alignment

    @property
    def held_bytes(self) -> int:
        """Bytes of K/V and states on the device that requests or the prefix cache hold."""
        usage = self.states.usage()
        return super().held_bytes + (usage.total - usage.free) * self._state_pool.bytes_per_state

    @property
    def limit_bytes(self) -> int:
        """Bytes of all slots, of tokens and of states."""
        return super().limit_bytes + self._state_pool.num_bytes

    def state_usage(self) -> SlotUsage:
        """Count states that are free, or held by requests and prefixes."""
        return self.states.usage()

    def take_state(self) -> int:
        """Give a request a slot for a state, with anything in it; the least valuable recorded one leaves if need be.

        Raises:
            CapacityError: Requests hold all of them.
        """
        while not self.states.free_size:
            evicted = self._prefix.evict(0, 1)
            self._release_forgotten(evicted)
            if not len(evicted.state_freed) and not self._let_oldest_go():
                raise CapacityError(
                    f"running requests hold all {self.states.num_slots} states; wait, or raise kv_bytes or num_slots"
                )
        return int(self.states.allocate(1)[0])

    def give_states_back(self, states: Iterable[int]) -> None:
        """Take back what `take_state` gave."""
        self.states.release(_slots(states), Owner.REQUEST)

    def unlock_state(self, lock: PrefixLock) -> None:
        """Let the state at the end of a locked prefix go when it has been copied; the prefix itself stays locked."""
        if lock.epoch == self._epoch:
            self._prefix.dec_state_lock_only(lock.receipt)

    def store_prefix(
        self,
        key: RadixKey,
        slots: NDArray[np.int64],
        layers: WindowRow | StateRow | None,
        *,
        priority: int = 0,
        counted_len: int = 0,
    ) -> None:
        """See `KVSpace.store_prefix`; up to the last recorded state, and the cache takes over the states of the request."""
        assert isinstance(layers, StateRow), "requests of these models have states"
        offered = {position: state for position, state in layers.recorded.items() if position <= len(key)}
        for position, state in offered.items():
            read = self._state_pool.num_tokens(state)
            if read != position:
                raise CorruptCacheError(f"a state that has read {read} tokens was recorded after {position}")
        result = self._prefix.insert(key, slots, priority=priority, counted_len=counted_len, states=offered)
        self.allocator.retain(slots[result.prefix_len : result.total_len], Owner.CACHE)
        returned = set(result.state_freed.tolist())
        self.states.transfer(_slots(set(offered.values()) - returned), Owner.REQUEST, Owner.CACHE)
        self.give_states_back(returned)
        for position in offered:
            del layers.recorded[position]

    def rebuild(self) -> None:
        """See `KVSpace.rebuild`."""
        self.states.rebuild()
        super().rebuild()

    def reset(self) -> None:
        """Forget all prefixes; running requests keep their slots and states."""
        self._release_forgotten(self._prefix.reset_both())
        super().reset()

    def _release_forgotten(self, result: EvictResult) -> None:
        super()._release_forgotten(result)
        if len(result.state_freed):
            self.states.release(result.state_freed, Owner.CACHE)

    def check(self) -> None:
        """Verify every invariant; raises `CorruptCacheError`. For tests and idle time."""
        super().check()
        self.states.check()
        usage = self.states.usage()
        if usage.free + usage.request + usage.cached != usage.total:
            raise CorruptCacheError(f"states are not conserved: {usage}")
        if self._prefix.state_total_size != self.states.num_held(Owner.CACHE):
            raise CorruptCacheError("the prefix cache and the allocator disagree about who holds which states")
        if len(self.donors):
            raise CorruptCacheError("a model with states has a donor")


def _slots(states: Iterable[int]) -> NDArray[np.int64]:
    return np.array(sorted(states), dtype=np.int64)
