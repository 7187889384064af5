"""What every exact prefix cache offers, and the values it answers with. Nothing here knows a KV pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from kvgraft.prefix.key import RadixKey
    from kvgraft.prefix.request import CacheRequest
    from kvgraft.types import Fidelity

SlotArray = NDArray[np.int64]
"""1-D indices of KV slots, one per token."""


def _no_slots() -> SlotArray:
    empty = np.empty(0, dtype=np.int64)
    empty.flags.writeable = False
    return empty


NO_SLOTS = _no_slots()
"""A read-only array of no slots."""


class PrefixHandle:
    """Names one stored prefix; opaque to callers.

    Stays good while the prefix is stored, through splits and inserts. Whoever needs the prefix to stay locks the handle
    before anything may evict. A handle of a dropped prefix or of another cache is refused.
    """

    __slots__ = ()


class LookupRequest(Protocol):
    """What a lookup may know about who asks; enables the semantic fallback."""

    @property
    def rid(self) -> str:
        """Name of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchPrefixParams:
    """A lookup on behalf of a request.

    Attributes:
        key: What to look up.
        req: Who asks; None for a lookup that must stay exact.
    """

    key: RadixKey
    req: LookupRequest | None = None


@dataclass(frozen=True, slots=True)
class FidelitySpan:
    """Positions `[start, start + length)` of a match whose KV relates to the query's tokens as `fidelity` says."""

    start: int
    length: int
    fidelity: Fidelity


class MatchResult:
    """The longest stored prefix of a key.

    The slots are put together when they are first asked for; they stay what they were at the time of the match.

    Attributes:
        prefix_len: Tokens matched on the device, a multiple of the page size.
        handle: The stored prefix that was matched; what to lock.
        host_hit_len: Further tokens behind `prefix_len` that a host tier holds (`load_back` brings them).
        substituted: Whether the KV belongs to other tokens (semantic fallback). Such a request is never inserted.
        skip_insert: Whether the request must not be inserted.
        owned: Whether `kv_indices` are copies that the caller owns and frees; otherwise the cache goes on owning them.
        spans: For a substituted match, fidelity by position.
        source_id: Name that the semantic provider gave its donor.
    """

    __slots__ = ("_joined", "_parts", "handle", "prefix_len")

    host_hit_len: int = 0
    substituted: bool = False
    skip_insert: bool = False
    owned: bool = False
    spans: tuple[FidelitySpan, ...] = ()
    source_id: str = ""

    def __init__(self, parts: list[SlotArray], prefix_len: int, handle: PrefixHandle) -> None:
        self._parts = parts
        self._joined: SlotArray | None = None
        self.prefix_len = prefix_len
        self.handle = handle

    def __repr__(self) -> str:
        kind = "substituted " if self.substituted else ""
        return f"MatchResult({kind}prefix_len={self.prefix_len}, host_hit_len={self.host_hit_len})"

    @property
    def host_handle(self) -> PrefixHandle:
        """Where the host part ends; `handle` if there is none."""
        return self.handle

    @property
    def kv_indices(self) -> SlotArray:
        """Read-only int64 `(prefix_len,)`. Complexity: O(prefix_len) the first time unless one node holds it all."""
        if self._joined is None:
            self._joined = join_slots(self._parts)[: self.prefix_len]
        return self._joined

    @property
    def swa_indices(self) -> SlotArray:
        """Slots of the sliding-window pool by position; empty for caches without one."""
        return NO_SLOTS


@dataclass(frozen=True, slots=True, eq=False)
class InsertResult:
    """Which of the offered slots the cache took: `kv_indices[prefix_len:total_len]`.

    The caller keeps or frees the others: duplicates `[:prefix_len]` of what was stored before (where they are not the
    cache's own slots) and the tail `[total_len:]` that fills no page.

    Attributes:
        prefix_len: Tokens that were in the cache already.
        total_len: Tokens of the key that are in the cache now, its length in whole pages.
        handle: The stored prefix of `total_len` tokens.
    """

    prefix_len: int
    total_len: int
    handle: PrefixHandle


@dataclass(frozen=True, slots=True, eq=False)
class EvictResult:
    """Slots that the cache has forgotten and the caller frees.

    Attributes:
        freed: int64 `(n,)` slots of the full-attention (or only) pool.
        swa_freed: int64 `(m,)` slots of the sliding-window pool; empty for caches without one.
    """

    freed: SlotArray
    swa_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)

    @property
    def num_tokens(self) -> int:
        """How many tokens of the full-attention (or only) pool were dropped."""
        return len(self.freed)


NOTHING_FREED = EvictResult(NO_SLOTS)


class PrefixCache(ABC):
    """Maps token prefixes to KV slots, per namespace and in whole pages.

    The cache decides and its owner frees: slots leave through results, never through a callback into a pool.
    Sizes are in tokens. Not thread-safe.
    """

    @property
    @abstractmethod
    def page_size(self) -> int:
        """Tokens per page; nothing is matched or stored in smaller pieces."""

    @property
    @abstractmethod
    def evictable_size(self) -> int:
        """Stored tokens that no lock protects."""

    @property
    @abstractmethod
    def protected_size(self) -> int:
        """Stored tokens under at least one lock."""

    @property
    def total_size(self) -> int:
        """Stored tokens."""
        return self.evictable_size + self.protected_size

    @property
    def disabled(self) -> bool:
        """Whether the cache never stores anything."""
        return False

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams | RadixKey) -> MatchResult:
        """Find the longest stored prefix in whole pages and mark it as used now.

        May restructure the cache (a match that ends inside a node splits it), never what it stores. A bare key is a
        lookup without a request.
        """

    @abstractmethod
    def insert(
        self,
        key: RadixKey,
        kv_indices: SlotArray | None = None,
        *,
        after: PrefixHandle | None = None,
        priority: int = 0,
    ) -> InsertResult:
        """Store `key` in whole pages; the part that is not stored yet takes its slots from `kv_indices`.

        Args:
            key: Tokens and namespace; copied.
            kv_indices: One slot per element of `key`; copied.
            after: Handle of a stored prefix with which `key` begins: the insert starts behind it and costs only what
                follows. The caller vouches that the prefix is the key's own.
            priority: For the `priority` policy; the path keeps the largest it has seen.

        Raises:
            ConfigError: `kv_indices` are not integers, one per element, or `after` is no prefix of `key`.
            CorruptCacheError: `after` is of a dropped prefix or of another cache.
        """

    @abstractmethod
    def evict(self, num_tokens: int) -> EvictResult:
        """Drop unlocked prefixes, the least valuable first, until `num_tokens` are freed or nothing unlocked is left.

        May free more: what is dropped are whole nodes.
        """

    @abstractmethod
    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """Keep the prefix of `handle` from eviction; returns the receipt that the matching `dec_lock_ref` takes.

        Raises:
            CorruptCacheError: The handle is of a dropped prefix or of another cache.
        """

    @abstractmethod
    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back one lock; returns slots that nobody can use any more, for the caller to free (mostly none).

        Raises:
            CorruptCacheError: The handle holds no lock here. Nothing has changed then.
        """

    @abstractmethod
    def cache_unfinished_req(self, req: CacheRequest) -> EvictResult:
        """Store what `req` has computed so far and go on with it: between chunks of a prefill, or at preemption.

        Points the row of `req` to the cache's slots, moves its lock and returns its duplicates for the caller to free.
        """

    @abstractmethod
    def cache_finished_req(self, req: CacheRequest, *, is_insert: bool = True) -> EvictResult:
        """Store what `req` has computed unless it must not be, release its lock and return what the caller frees.

        Afterwards the request owns nothing: every slot of its row is in the cache or in the result.
        """

    @abstractmethod
    def reset(self) -> SlotArray:
        """Forget everything, locked or not, and return every slot for the caller to free. Handles become stale."""

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; for tests and idle time.

        Raises:
            CorruptCacheError: The first one that does not hold.
        """

    def supports_streaming_session(self) -> bool:
        """Whether the cache keeps sessions itself; otherwise `create_tree_cache` wraps it where they are asked for."""
        return False


def as_slots(kv_indices: SlotArray, num_tokens: int) -> SlotArray:
    """Return `kv_indices` if they are integers, one per token; raises `ConfigError` otherwise."""
    slots = np.asarray(kv_indices)
    if slots.shape != (num_tokens,) or (slots.dtype.kind not in "iu" and num_tokens):
        raise ConfigError(f"kv_indices must be {num_tokens} integers, one per token, not {slots.dtype} {slots.shape}")
    return slots


def join_slots(parts: list[SlotArray]) -> SlotArray:
    """Concatenate into one array; read-only, and without a copy of a single part."""
    if not parts:
        return NO_SLOTS
    if len(parts) == 1:
        return parts[0]
    joined = np.concatenate(parts)
    joined.flags.writeable = False
    return joined
