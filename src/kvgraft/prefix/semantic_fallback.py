"""Turn a proposal into a sound match of one prefix cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.results import FidelitySpan, MatchResult, PrefixHandle, SlotArray
from kvgraft.token_key import RadixKey, common_prefix_len
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.prefix.results import EvictResult
    from kvgraft.substitution.guard import GuardedProvider
    from kvgraft.substitution.provider import SemanticPrefixResult
    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)

SlotCopier = Callable[[SlotArray], SlotArray | None]
"""Copies the KV of given slots into new ones and returns those, or None if there is no room."""


class SubstitutedMatchResult(MatchResult):
    """A match with KV of other tokens, after an exact prefix."""

    __slots__ = ("_protected_len", "metadata", "source_id", "spans")

    substituted = True
    skip_insert = True

    def __init__(
        self,
        parts: list[SlotArray],
        handle: PrefixHandle,
        *,
        protected_len: int,
        spans: tuple[FidelitySpan, ...],
        proposal: SemanticPrefixResult,
    ) -> None:
        super().__init__(parts, sum(map(len, parts)), handle)
        self._protected_len = protected_len
        self.spans = spans
        self.source_id = proposal.source_id
        self.metadata = proposal.metadata or {}

    @property
    def protected_len(self) -> int:
        """Length of the exact prefix, or all of it where the slots are the donor's."""
        return self._protected_len


class DonorCache(Protocol):
    """The part of a cache that the fallback uses."""

    @property
    def page_size(self) -> int:
        """Tokens per page; a substituted match is cut to whole ones."""

    def _match_prefix_exact(self, key: RadixKey) -> MatchResult:
        """Match by the key alone."""

    def inc_lock_ref(self, handle: PrefixHandle) -> PrefixHandle:
        """Keep a prefix from eviction."""

    def dec_lock_ref(self, handle: PrefixHandle) -> EvictResult:
        """Give back a lock."""


class SemanticFallback:
    """Asks a provider where an exact lookup leaves much to compute, and makes a match of one cache of its proposal.

    Attributes:
        guard: The provider with its deadline, and the counters of its calls.
    """

    def __init__(self, guard: GuardedProvider, *, copy_slots: SlotCopier | None, min_semantic_gain: int) -> None:
        if min_semantic_gain < 1:
            raise ConfigError(f"min_semantic_gain must be at least 1, not {min_semantic_gain}")
        self.guard = guard
        self._copy_slots = copy_slots
        self._min_gain = min_semantic_gain

    def on_miss(self, cache: DonorCache, key: RadixKey, rid: str, exact: MatchResult) -> MatchResult:
        """Return a substituted match, or `exact` where too little is left to gain, or nothing gains enough."""
        if len(key) - 1 - exact.prefix_len < self._min_gain or exact.host_hit_len:
            return exact
        counters = self.guard.counters
        num_failed = counters.num_failed
        proposal = self.guard.propose(rid, key.token_ids)
        match = exact if proposal is None else self._realise(cache, key, proposal, exact)
        if match is exact:
            counters.misses += counters.num_failed == num_failed
            return exact
        counters.hits += 1
        if match.source_id:
            logger.debug("semantic hit of request %s: %d tokens of %s", rid, match.prefix_len, match.source_id)
        return match

    def _realise(
        self, cache: DonorCache, key: RadixKey, proposal: SemanticPrefixResult, exact: MatchResult
    ) -> MatchResult:
        """Look the proposed tokens up and hand out their KV without giving up or sharing ownership."""
        try:
            donor_key = RadixKey(np.asarray(proposal.alternate_token_ids), key.extra_key, key.cache_salt, key.is_bigram)
        except ConfigError:
            if self.guard.is_bare:
                raise
            self.guard.counters.errors += 1
            return exact
        donor = cache._match_prefix_exact(donor_key)
        length = self._clip(cache.page_size, donor.prefix_len, len(key), proposal.num_cached_tokens)
        start = exact.prefix_len
        if length - start < self._min_gain:
            return exact
        query, alternate = key.token_ids[:length], donor_key.token_ids[:length]
        spans = _fidelity(query, alternate, start)
        if self._copy_slots is None:
            if common_prefix_len(query, alternate) < start:
                return exact  # a reference to the donor would give up exact K/V
            slots = donor.kv_indices[:length]
            return SubstitutedMatchResult([slots], donor.handle, protected_len=length, spans=spans, proposal=proposal)
        copied = self._copy(cache, (exact.handle, donor.handle), donor.kv_indices[start:length])
        if copied is None:
            return exact
        parts = [exact.kv_indices, copied]
        return SubstitutedMatchResult(parts, exact.handle, protected_len=start, spans=spans, proposal=proposal)

    def _copy(self, cache: DonorCache, handles: Sequence[PrefixHandle], slots: SlotArray) -> SlotArray | None:
        """Let the owner copy; what the request is to stand on is locked meanwhile, because making room may evict."""
        assert self._copy_slots is not None
        locks = [cache.inc_lock_ref(handle) for handle in handles]
        try:
            copied = self._copy_slots(slots)
        finally:
            for lock in locks:
                cache.dec_lock_ref(lock)
        if copied is None:
            return None
        copied = np.asarray(copied, dtype=np.int64)
        if copied.shape != slots.shape:
            raise ConfigError(f"copy_slots returned {copied.shape} slots for {slots.shape}; one per slot or None")
        return copied

    @staticmethod
    def _clip(page_size: int, donor_len: int, query_len: int, num_cached_tokens: int) -> int:
        """The last token is always computed, for its logits."""
        length = min(donor_len, query_len - 1)
        if num_cached_tokens > 0:
            length = min(length, num_cached_tokens)
        return max(length, 0) // page_size * page_size


def _fidelity(query: TokenArray, donor: TokenArray, prefix_len: int) -> tuple[FidelitySpan, ...]:
    """Classes by position: equal tokens after a difference are `shifted` (another context), others `substituted`.

    The first `prefix_len` positions are exact, independent of the donor.
    """
    classes = np.where(query != donor, 2, 1)
    classes[: max(prefix_len, common_prefix_len(query, donor))] = 0
    names = (Fidelity.EXACT, Fidelity.SHIFTED, Fidelity.SUBSTITUTED)
    starts = np.flatnonzero(np.diff(classes, prepend=-1))
    ends = np.append(starts[1:], len(classes))
    return tuple(
        FidelitySpan(int(start), int(end - start), names[classes[start]])
        for start, end in zip(starts, ends, strict=True)
    )
