"""The semantic hook: on an exact miss, a provider may name other tokens whose KV could stand in. Approximate by nature.

Source: the contract of `SemanticPrefixProvider` follows SGLang pull request #20806 at the interface. What a hit does is
different, because there a hit lets two owners hold one slot and publishes the donor's KV under the query's tokens: here
a hit is a copy or a locked read-only reference, is marked as substituted and is never stored (docs/design/prefix-cache.md).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvgraft.errors import ConfigError
from kvgraft.prefix.key import RadixKey
from kvgraft.prefix.results import FidelitySpan, MatchResult, PrefixHandle, SlotArray
from kvgraft.types import Fidelity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from concurrent.futures import Future

    from kvgraft.prefix.results import EvictResult
    from kvgraft.types import TokenArray

logger = logging.getLogger(__name__)

SlotCopier = Callable[[SlotArray], SlotArray | None]
"""Copies the KV of given slots into new ones and returns those, or None if there is no room."""

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class SemanticPrefixResult:
    """What a provider proposes for a prompt that matches nothing.

    Attributes:
        alternate_token_ids: Tokens of a stored prompt whose KV may stand in for the query's.
        num_cached_tokens: How many of them are meant; 0 leaves it to the cache.
        skip_insert: Whether the request must not be stored. Substituted KV is never stored either way.
        metadata: For the provider's own use.
        source_id: Name of the donor, for logs and reports.
    """

    alternate_token_ids: Sequence[int]
    num_cached_tokens: int
    skip_insert: bool = True
    metadata: Mapping[str, object] | None = None
    source_id: str = ""


class SemanticPrefixProvider(ABC):
    """Finds a stored prompt that resembles another one. Called in the path of a request: be quick."""

    @abstractmethod
    def on_prefix_miss(self, rid: str, token_ids: TokenArray) -> SemanticPrefixResult | None:
        """Propose a stored prompt for `token_ids` (the original ones, read-only), or None."""

    @abstractmethod
    def on_request_cached(self, rid: str, token_ids: TokenArray) -> None:
        """Hear that exactly `token_ids` (read-only) were stored by a finished request."""

    def on_init(self, model_config: object = None) -> None:  # noqa: B027 (optional)
        """Prepare; called once by `set_semantic_provider`."""

    def on_shutdown(self) -> None:  # noqa: B027 (optional)
        """Give back resources; called by whoever owns the provider."""


@dataclass(slots=True)
class SemanticCounters:
    """What became of the provider's calls."""

    hits: int = 0
    misses: int = 0
    errors: int = 0
    timeouts: int = 0


class SubstitutedMatchResult(MatchResult):
    """A match whose KV belongs to other tokens."""

    __slots__ = ("owned", "source_id", "spans")

    substituted = True
    skip_insert = True

    def __init__(
        self,
        parts: list[SlotArray],
        prefix_len: int,
        handle: PrefixHandle,
        *,
        owned: bool,
        spans: tuple[FidelitySpan, ...],
        source_id: str,
    ) -> None:
        super().__init__(parts, prefix_len, handle)
        self.owned = owned
        self.spans = spans
        self.source_id = source_id


class DonorCache(Protocol):
    """What the fallback asks of a cache whose prefixes may stand in for others."""

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
    """Turns a provider's proposal into a sound match of one cache.

    One call may run at a time behind a deadline: while a stalled one still runs, further ones are counted as timeouts
    at once, so that a stuck provider costs one thread and no waiting.
    """

    def __init__(
        self, provider: SemanticPrefixProvider, *, copy_slots: SlotCopier | None, deadline_s: float | None
    ) -> None:
        if deadline_s is not None and not deadline_s > 0:
            raise ConfigError(f"deadline_s must be above 0 or None, not {deadline_s}")
        self.provider = provider
        self.counters = SemanticCounters()
        self._copy_slots = copy_slots
        self._deadline_s = deadline_s
        self._pool = None if deadline_s is None else ThreadPoolExecutor(1, "kvgraft-semantic")
        self._running: Future[object] | None = None

    def close(self) -> None:
        """Stop the thread; does not wait for a stalled call."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def on_miss(self, cache: DonorCache, key: RadixKey, rid: str, miss: MatchResult) -> MatchResult:
        """Ask the provider; returns a substituted match, or `miss`."""
        token_ids = self._handed_out(key.token_ids)
        proposal = self._call(lambda: self.provider.on_prefix_miss(rid=rid, token_ids=token_ids))
        match = miss if proposal is None else self._realise(cache, key, proposal, miss)
        if match is miss:
            self.counters.misses += 1
            return miss
        self.counters.hits += 1
        if match.source_id:
            logger.debug("semantic hit of request %s: %d tokens of %s", rid, match.prefix_len, match.source_id)
        return match

    def on_cached(self, rid: str, token_ids: TokenArray) -> None:
        """Tell the provider what was stored."""
        known = self._handed_out(token_ids)
        self._call(lambda: self.provider.on_request_cached(rid=rid, token_ids=known))

    def _handed_out(self, token_ids: TokenArray) -> TokenArray:
        """Tokens for the provider, read-only; a copy where it may go on reading when the caller has gone on."""
        view = token_ids.view() if self._deadline_s is None else token_ids.copy()
        view.flags.writeable = False
        return view

    def _realise(
        self,
        cache: DonorCache,
        key: RadixKey,
        proposal: SemanticPrefixResult,
        miss: MatchResult,
    ) -> MatchResult:
        """Look the proposed tokens up and hand out their KV without giving up or sharing ownership."""
        try:
            donor_key = RadixKey(np.asarray(proposal.alternate_token_ids), key.extra_key, key.cache_salt, key.is_bigram)
        except ConfigError:
            if self._deadline_s is None:
                raise
            self.counters.errors += 1
            return miss
        donor = cache._match_prefix_exact(donor_key)
        length = self._clip(cache.page_size, donor.prefix_len, len(key), proposal.num_cached_tokens)
        if not length:
            return miss
        spans = _fidelity(key.token_ids[:length], donor_key.token_ids[:length])
        slots, handle = donor.kv_indices[:length], donor.handle
        owned = self._copy_slots is not None
        if self._copy_slots is not None:
            copied = self._copy(cache, donor.handle, slots)
            if copied is None:
                return miss
            slots, handle = copied, miss.handle
        source_id = proposal.source_id
        return SubstitutedMatchResult([slots], length, handle, owned=owned, spans=spans, source_id=source_id)

    def _copy(self, cache: DonorCache, handle: PrefixHandle, slots: SlotArray) -> SlotArray | None:
        """Let the owner copy; the donor is locked meanwhile, because making room may evict."""
        assert self._copy_slots is not None
        lock = cache.inc_lock_ref(handle)
        try:
            copied = self._copy_slots(slots)
        finally:
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

    def _call(self, call: Callable[[], Answer]) -> Answer | None:
        """Call the provider directly, or behind the deadline with errors and overruns counted."""
        if self._pool is None:
            return call()
        if self._running is not None and not self._running.done():
            self.counters.timeouts += 1
            return None
        future = self._pool.submit(call)
        self._running = future  # type: ignore[assignment]
        try:
            return future.result(self._deadline_s)
        except FutureTimeoutError:
            self.counters.timeouts += 1
            logger.warning("semantic provider took longer than %s s; counted as a miss", self._deadline_s)
        except Exception:
            self.counters.errors += 1
            logger.exception("semantic provider failed; counted as a miss")
        return None


def _fidelity(query: TokenArray, donor: TokenArray) -> tuple[FidelitySpan, ...]:
    """Classes by position: equal tokens behind a difference are `shifted` (another context), others `substituted`."""
    differs = query != donor
    exact_len = int(differs.argmax()) if differs.any() else len(query)
    classes = np.where(differs, 2, 1)
    classes[:exact_len] = 0
    names = (Fidelity.EXACT, Fidelity.SHIFTED, Fidelity.SUBSTITUTED)
    starts = np.flatnonzero(np.diff(classes, prepend=-1))
    ends = np.append(starts[1:], len(classes))
    return tuple(
        FidelitySpan(int(start), int(end - start), names[classes[start]])
        for start, end in zip(starts, ends, strict=True)
    )
