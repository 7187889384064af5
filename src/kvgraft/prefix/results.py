"""Arguments and results of prefix caches: slots, handles, matches, inserts and evictions."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.token_key import RadixKey
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

    Stays good while the prefix is stored, through splits and inserts. To keep the prefix, lock the handle
    before anything may evict. A handle of a dropped prefix or of another cache is refused.
    """

    __slots__ = ()


class OutlineNode(NamedTuple):
    """A node of a prefix tree without its tokens."""

    parent: int
    """Index of the node that it continues, in the same outline; -1 where it begins a prompt."""
    num_tokens: int
    """Tokens that it adds to its parent's."""
    is_protected: bool


class LookupRequest(Protocol):
    """The request of a lookup; enables the semantic fallback."""

    @property
    def rid(self) -> str:
        """Name of the request."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchPrefixParams:
    """A lookup on behalf of a request."""

    key: RadixKey
    req: LookupRequest | None = None
    """Who asks; None for a lookup that must stay exact."""


@dataclass(frozen=True, slots=True)
class FidelitySpan:
    """Positions `[start, start + length)` of a match with KV that relates to the query's tokens as `fidelity` says."""

    start: int
    length: int
    fidelity: Fidelity


class StoredLength(NamedTuple):
    """Length of the stored part of a key."""

    prefix_len: int
    host_hit_len: int = 0
    """Further tokens that a host tier holds."""

    @property
    def total(self) -> int:
        """Tokens stored on either."""
        return self.prefix_len + self.host_hit_len


class MatchResult:
    """The longest stored prefix of a key.

    The slots are put together when they are first asked for; they stay what they were at the time of the match.

    Attributes:
        prefix_len: Tokens matched on the device, a multiple of the page size.
        handle: The stored prefix that was matched; what to lock.
        host_hit_len: Further tokens after `prefix_len` that a host tier holds (`load_back` brings them).
        substituted: Whether the KV belongs to other tokens (semantic fallback). Such a request is never inserted.
        skip_insert: Whether the request must not be inserted.
        spans: For a substituted match, fidelity by position.
        source_id: Name that the semantic provider gave its donor.
        metadata: What it said besides.
    """

    __slots__ = ("_joined", "_parts", "handle", "prefix_len")

    host_hit_len: int = 0
    substituted: bool = False
    skip_insert: bool = False
    spans: tuple[FidelitySpan, ...] = ()
    source_id: str = ""
    metadata: Mapping[str, object] = MappingProxyType({})

    def __init__(self, parts: list[SlotArray], prefix_len: int, handle: PrefixHandle) -> None:
        self._parts = parts
        self._joined: SlotArray | None = None
        self.prefix_len = prefix_len
        self.handle = handle

    def __repr__(self) -> str:
        kind = "substituted " if self.substituted else ""
        return f"MatchResult({kind}prefix_len={self.prefix_len}, host_hit_len={self.host_hit_len})"

    @property
    def protected_len(self) -> int:
        """Leading tokens with slots that stay the cache's; those of later ones are copies that the caller owns and frees."""
        return self.prefix_len

    @property
    def host_handle(self) -> PrefixHandle:
        """End of the host part; `handle` if there is none."""
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
    """The offered slots that the cache took: `kv_indices[prefix_len:total_len]`.

    The caller keeps or frees the others: duplicates `[:prefix_len]` of what was stored before (where they are not the
    cache's own slots) and the tail `[total_len:]` that fills no page.
    """

    prefix_len: int
    """Tokens that were in the cache already."""
    total_len: int
    """Tokens of the key that are in the cache now, its length in whole pages."""
    handle: PrefixHandle


@dataclass(frozen=True, slots=True, eq=False)
class EvictResult:
    """Slots that the cache has forgotten and the caller frees."""

    freed: SlotArray
    """int64 `(n,)` slots of the full-attention (or only) pool."""
    swa_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """int64 `(m,)` slots of the sliding-window pool; empty for caches without one."""
    state_freed: SlotArray = field(default_factory=lambda: NO_SLOTS)
    """int64 `(k,)` slots of the pool of states, one per state; empty for caches without one."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the full-attention (or only) pool that were dropped."""
        return len(self.freed)


NOTHING_FREED = EvictResult(NO_SLOTS)


def join_results(*results: EvictResult) -> EvictResult:
    """Join what several steps have freed."""
    return EvictResult(
        np.concatenate([NO_SLOTS, *(result.freed for result in results)]),
        np.concatenate([NO_SLOTS, *(result.swa_freed for result in results)]),
        np.concatenate([NO_SLOTS, *(result.state_freed for result in results)]),
    )


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
