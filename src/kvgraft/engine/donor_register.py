"""Make donors of what requests have computed; grafted tokens never become one.

Where all layers share one space of slots, a donor refers to the slots of the request that computed it. Donors of hybrid
models are copies on the host, because the window slots of their text are given back as soon as no row can see them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvgraft.reuse.lineage import computed_runs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgraft.engine.hybrid_space import HybridKVSpace
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.engine.request import RequestCache
    from kvgraft.engine.windows import RequestWindows
    from kvgraft.reuse.lineage import ComputedRun
    from kvgraft.types import DonorId, Match, TokenArray


class DonorRegister(ABC):
    """Registers the text of requests."""

    def __init__(self, space: KVSpace, *, min_run: int, max_generation: int) -> None:
        self._donors = space.donors
        self._min_run = min_run
        self._max_generation = max_generation

    @abstractmethod
    def register(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Register what the request has computed of `token_ids`; may be called again when there is more."""

    def _is_worth(self, num_tokens: int, generation: int) -> bool:
        return num_tokens >= self._min_run and generation <= self._max_generation


class SlotDonors(DonorRegister):
    """Donors that share the slots of the request."""

    def __init__(self, space: KVSpace, *, min_run: int, max_generation: int) -> None:
        super().__init__(space, min_run=min_run, max_generation=max_generation)
        self._space = space

    def register(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Register a request without a graft as a whole, of a grafted one each computed piece."""
        if cache.plan.spans:
            for start, stop, generation in computed_pieces(cache, len(token_ids)):
                self._add_once(cache, token_ids, start, stop, generation)
            return
        known = self._donors.find(cache.namespace, token_ids, max_generation=0)
        if any(match.length == len(token_ids) for match in known):
            return
        self._remove_superseded(known)
        self._add(cache, token_ids, 0, len(token_ids), 0)

    def _add_once(self, cache: RequestCache, token_ids: TokenArray, start: int, stop: int, generation: int) -> None:
        """Register a piece of a grafted request; a longer version replaces what was registered from the same start."""
        known = cache.registered.get(start)
        if known is not None:
            donor = self._donors.get(known)
            if donor is not None and donor.num_tokens == stop - start:
                return
            if donor is not None and not self._donors.is_pinned(known):
                self._space.remove_donor(known)
        donor_id = self._add(cache, token_ids, start, stop, generation)
        if donor_id is not None:
            cache.registered[start] = donor_id

    def _remove_superseded(self, matches: Sequence[Match]) -> None:
        """Drop donors that the sequence about to be registered begins with, where nobody else grafts from them."""
        for match in matches:
            donor = self._donors.get(match.donor_id)
            if donor is None or self._donors.is_pinned(donor.donor_id):
                continue
            if match.target_start == donor.start_position == 0 and match.length == donor.num_tokens:
                self._space.remove_donor(donor.donor_id)

    def _add(
        self, cache: RequestCache, token_ids: TokenArray, start: int, stop: int, generation: int
    ) -> DonorId | None:
        if not self._is_worth(stop - start, generation):
            return None
        return self._space.add_donor(
            cache.namespace,
            token_ids[start:stop],
            cache.kv_indices[start:stop].copy(),
            generation=generation,
            start_position=start,
            context=_context(token_ids, start),
        )


class HostDonors(DonorRegister):
    """Donors of hybrid models: what was computed since the last call, copied to the host.

    A stretch whose window K/V were not captured, for want of host memory, is left out.
    """

    def __init__(self, space: HybridKVSpace, windows: RequestWindows, *, min_run: int, max_generation: int) -> None:
        super().__init__(space, min_run=min_run, max_generation=max_generation)
        self._space = space
        self._windows = windows

    def register(self, cache: RequestCache, token_ids: TokenArray) -> None:
        """Register each piece that was computed since the last call and that no donor has yet."""
        row = cache.windows
        if row is None or not row.is_donor:
            return
        done = row.registered_len
        for start, stop, generation in computed_pieces(cache, len(token_ids)):
            first = max(start, done)
            if self._is_worth(stop - first, generation) and not self._is_known(cache, token_ids[first:stop]):
                self._add(cache, token_ids, first, stop, generation)
        row.registered_len = max(done, len(token_ids))
        self._windows.forget_captured(cache)

    def _is_known(self, cache: RequestCache, piece: TokenArray) -> bool:
        matches = self._donors.find(cache.namespace, piece, max_generation=0)
        return any(match.length == len(piece) for match in matches)

    def _add(self, cache: RequestCache, token_ids: TokenArray, start: int, stop: int, generation: int) -> None:
        for first, block in self._windows.known_parts(cache, start, stop):
            last = first + block.num_tokens
            if not self._is_worth(last - first, generation):
                continue
            self._space.add_host_donor(
                cache.namespace,
                token_ids[first:last],
                cache.kv_indices[first:last],
                block,
                generation=generation,
                start_position=first,
                context=_context(token_ids, first),
            )


def computed_pieces(cache: RequestCache, num_tokens: int) -> Iterator[ComputedRun]:
    """Yield what a request computed in `[exact prefix, num_tokens)`, between its grafts.

    What the prefix cache gave came from a request that registered it.
    """
    generations = {donor.donor_id: donor.generation for donor in cache.donors}
    spans = ((span.target_start, span.target_end, generations[span.donor_id]) for span in cache.plan.spans)
    return computed_runs(spans, cache.plan.exact_len, num_tokens)


def _context(token_ids: TokenArray, start: int) -> bytes:
    return hashlib.blake2b(token_ids[:start].tobytes(), digest_size=16).digest() if start else b""
