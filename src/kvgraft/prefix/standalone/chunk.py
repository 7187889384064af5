"""No reuse at all: the cache for engines with the prefix cache switched off. Requests own all of their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, CorruptCacheError
from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.results import (
    NO_SLOTS,
    NOTHING_FREED,
    EvictResult,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    PrefixHandle,
    SlotArray,
)
from kvgraft.windows import window_kind

if TYPE_CHECKING:
    from kvgraft.prefix.request import RequestRow
    from kvgraft.token_key import RadixKey


class _EmptyPrefix(PrefixHandle):
    """The only prefix that is ever stored."""

    __slots__ = ()


class ChunkCache(PrefixCache):
    """Stores nothing; chunks of a prefill stay with their request. Every lookup is an empty match."""

    def __init__(self, page_size: int = 1) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, not {page_size}")
        self._page_size = page_size
        self._handle = _EmptyPrefix()

    @property
    def page_size(self) -> int:
        """Tokens per page; windows are freed in whole ones."""
        return self._page_size

    @property
    def evictable_size(self) -> int:
        """0: requests own all slots themselves."""
        return 0

    @property
    def protected_size(self) -> int:
        """0: there is nothing that a lock could protect."""
        return 0

    @property
    def disabled(self) -> bool:
        """True: a request that ends gets all of its slots back."""
        return True

    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Return the empty match."""
        return MatchResult([], 0, self._handle)

    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
        counted_len: int | None = None,
    ) -> InsertResult:
        """Take nothing; all of `kv_indices` stay the caller's."""
        return InsertResult(0, 0, self._handle)

    def evict(self, num_tokens: int) -> EvictResult:
        """Free nothing, however much is asked for: only requests hold slots."""
        return NOTHING_FREED

    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """Accept the empty prefix."""
        if handle is not self._handle:
            raise CorruptCacheError("the handle is of another cache: match again")
        return handle

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Accept the empty prefix."""
        self.inc_lock_ref(handle)
        return NOTHING_FREED

    def path_slots(self, handle: PrefixHandle, start: int = 0) -> SlotArray:
        """The empty prefix has none."""
        self.inc_lock_ref(handle)
        return NO_SLOTS

    def reset(self) -> SlotArray:
        """Return nothing; slots of running requests stay theirs."""
        return NO_SLOTS

    def check(self) -> None:
        """Find nothing: there is no state that could be damaged."""


class SWAChunkCache(ChunkCache):
    """Store nothing, but free window slots that a running request does not read any more."""

    def __init__(
        self,
        page_size: int = 1,
        *,
        sliding_window_size: int | None = None,
        attention_chunk_size: int | None = None,
    ) -> None:
        super().__init__(page_size)
        self.window = window_kind(sliding_window_size, attention_chunk_size)

    def advance_window(self, req: RequestRow) -> EvictResult:
        """Return window slots below the frontier. Complexity: O(tokens freed)."""
        frontier = self.window.frontier(req.committed_len, self.page_size)
        return EvictResult(NO_SLOTS, req.leave_windows(frontier))
