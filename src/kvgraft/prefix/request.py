"""A running request as a prefix cache sees it, in engines that follow SGLang's calls: its row of slots, and who owns them.

[0, protected_len)          the cache's slots, kept by the request's lock
[protected_len, len(row))   the request's own slots, and the states that it has recorded
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.results import NO_SLOTS, EvictResult, MatchResult, PrefixHandle, SlotArray
from kvgraft.token_key import RadixKey

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kvgraft.types import TokenArray


@dataclass(slots=True, eq=False)
class RequestRow:
    """A request's row of slots and its lock, shared by the cache and the owner. The owner grows it, the cache repoints it."""

    rid: str
    token_ids: TokenArray
    """int64 tokens so far, at least as many as have KV."""
    kv_indices: SlotArray
    """int64 slot of each position with KV. The cache writes to it: never an array that anything else reads."""
    extra_key: Hashable = None
    cache_salt: Hashable = None
    is_bigram: bool = False
    """Whether the cache is keyed by pairs of tokens; the last position then has no element of its own."""
    prompt_len: int | None = None
    """Length of the prompt; at the end the node is cut there so that outputs may leave first."""
    priority: int = 0
    handle: PrefixHandle | None = None
    """Receipt of the lock on the cached prefix, or None."""
    protected_len: int = 0
    """Positions with slots that the cache owns."""
    skip_insert: bool = False
    """Never store this request (set by a substituted match)."""
    session_id: str | None = None
    num_inserted: int = 0
    """Positions that earlier calls for this request stored; no hit is counted there again."""
    swa_indices: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """Slots of the sliding-window pool by position, -1 where there are none any more."""
    swa_evicted_len: int = 0
    """Positions below it have lost their own sliding-window slots."""
    states: dict[int, int] = field(default_factory=dict)
    """Slots of recorded states that are the request's own, by the number of tokens that each has read (`record_state`)."""

    def __post_init__(self) -> None:
        if self.protected_len > len(self.kv_indices):
            raise ConfigError(f"protected_len {self.protected_len} exceeds the {len(self.kv_indices)} slots of the row")

    @property
    def committed_len(self) -> int:
        """Positions with KV."""
        return len(self.kv_indices)

    def key(self, length: int | None = None) -> RadixKey:
        """Key of the first `length` tokens (default: those with KV); nothing is copied.

        The last protected pair of a bigram view reaches into a token without KV of its own, perhaps.
        """
        limit = max(self.committed_len, self.protected_len + self.is_bigram) if length is None else length
        return RadixKey(self.token_ids, self.extra_key, self.cache_salt, self.is_bigram, limit)

    def adopt(self, match: MatchResult, handle: PrefixHandle | None) -> None:
        """Start from a match: its slots become the beginning of the row.

        Args:
            match: Of this request's key. Slots after its `protected_len` become the request's own.
            handle: What `inc_lock_ref(match.handle)` returned.
        """
        self.kv_indices = np.array(match.kv_indices, dtype=np.int64)
        self.swa_indices = np.array(match.swa_indices, dtype=np.int64)
        self.handle = handle
        self.protected_len = match.protected_len
        self.num_inserted = 0
        self.skip_insert = self.skip_insert or match.skip_insert

    def grow(self, kv_indices: SlotArray, swa_indices: SlotArray = NO_SLOTS) -> None:
        """Append slots of positions that are computed next; those of windows for a hybrid cache. Complexity: O(row)."""
        self.kv_indices = np.concatenate([self.kv_indices, kv_indices])
        self.swa_indices = np.concatenate([self.swa_indices, swa_indices])

    def record_state(self, position: int, state: int) -> None:
        """Hand over the slot of the state after the first `position` tokens: it leaves the row when that is stored or ends.

        The state that a running request goes on with is its owner's, not the row's: hand over a copy, or the slot itself
        when the request ends.

        Raises:
            ConfigError: The position is in the part that the cache owns, or has no K/V yet, or has a state already.
        """
        if not max(self.protected_len, 1) <= position <= self.committed_len:
            raise ConfigError(
                f"a state after {position} tokens does not fit the row, of which {self.protected_len} are stored and "
                f"{self.committed_len} computed; record it before the row is stored that far"
            )
        if position in self.states:
            raise ConfigError(f"the row has a state after {position} tokens already; free one of the two")
        self.states[position] = state

    def leave_states(self, length: int = 0) -> SlotArray:
        """Give up the recorded states after more than `length` tokens; returns their slots."""
        positions = sorted(position for position in self.states if position > length)
        return np.array([self.states.pop(position) for position in positions], dtype=np.int64)

    def own_slots(self, start: int) -> EvictResult:
        """The request's own slots from `start` on, `protected_len` at least."""
        return EvictResult(self.kv_indices[start:], self.swa_indices[max(start, self.swa_evicted_len) :])

    def leave_windows(self, frontier: int) -> SlotArray:
        """Give up the request's own window slots below `frontier`, which only advances; returns them."""
        start = max(self.swa_evicted_len, self.protected_len)
        if frontier <= start:
            return NO_SLOTS
        freed = self.swa_indices[start:frontier].copy()
        self.swa_indices[start:frontier] = -1
        self.swa_evicted_len = frontier
        return freed

    def take_over(self, other: RequestRow, length: int) -> EvictResult:
        """Go on with the first `length` positions of `other` and its lock; returns what `other` owned after them.

        `other` holds nothing afterwards. What it had inserted counts no hit again.
        """
        freed, states = other.own_slots(length), other.leave_states(length)
        self.kv_indices, self.swa_indices = other.kv_indices[:length].copy(), other.swa_indices[:length].copy()
        self.swa_evicted_len = min(other.swa_evicted_len, length)
        self.states = other.states
        self.handle, self.protected_len = other.handle, other.protected_len
        self.num_inserted = other.protected_len
        other.let_go()
        return EvictResult(freed.freed.copy(), freed.swa_freed.copy(), states)

    def let_go(self) -> None:
        """Hold nothing any more; the caller has taken over slots and lock."""
        self.kv_indices = self.swa_indices = NO_SLOTS
        self.states = {}
        self.handle, self.protected_len, self.swa_evicted_len = None, 0, 0
