"""Reuse in one scheduler: promise what can be loaded, load it, publish what was computed, report.

`GraftRadixCache` calls this at the points where SGLang lets a cache take part. A failure is logged, counted and becomes a
miss, and the request is computed; nothing raises into the scheduler.

What a request owns and for how long:

    promised    nothing; matching runs again in every scheduling round
    loading     donors are pinned in the tree, for the time of the copy only
    loaded      private slots, which leave with the request's row
    finished    computed runs behind a copy go to the tree under a name of ours, copied ones are freed
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvgraft.integrations.sglang.flight import Flight
from kvgraft.integrations.sglang.planning import ReusePlan, request_namespace
from kvgraft.integrations.sglang.ranks import Decision, Ranks, Span
from kvgraft.integrations.sglang.refusals import refused_request
from kvgraft.integrations.sglang.reports import Attempt
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.integrations.sglang.donor_library import DonorLibrary
    from kvgraft.integrations.sglang.loading import Loader
    from kvgraft.integrations.sglang.planning import ReusePlanner
    from kvgraft.integrations.sglang.provider import SemanticSource
    from kvgraft.integrations.sglang.publishing import Publisher
    from kvgraft.integrations.sglang.reports import RequestLog

logger = logging.getLogger(__name__)

_STALE = "SGLang's cache may hold K/V of other weights; nothing is copied until it is emptied with /flush_cache"


class RequestReuse:
    """Takes every request of a scheduler through reuse. Not thread-safe.

    Requests are told apart as objects: ids come from clients, and one that went away may ask again under an id that is
    still on its way.

    Args:
        library: Donors.
        planner: Chooses what is loaded.
        loader: Copies it.
        publisher: Makes donors of what was computed.
        ranks: Decide together.
        log: Hears what became of every request.
        fingerprint: Of the model, for namespaces.
        min_run: Shortest run that is loaded.
        semantic: Asked where nothing else is found; None for nobody.
    """

    def __init__(
        self,
        *,
        library: DonorLibrary,
        planner: ReusePlanner,
        loader: Loader,
        publisher: Publisher,
        ranks: Ranks,
        log: RequestLog,
        fingerprint: str,
        min_run: int,
        semantic: SemanticSource | None = None,
    ) -> None:
        self._library = library
        self.log = log
        self._planner, self._loader, self._publisher, self._ranks = planner, loader, publisher, ranks
        self._fingerprint = fingerprint
        self._min_run = min_run
        self._semantic = semantic
        self._is_empty = True
        self._is_stale = False
        self._flights: WeakKeyDictionary[Any, Flight] = WeakKeyDictionary()

    @property
    def num_flights(self) -> int:
        """Requests that have been matched and not released."""
        return len(self._flights)

    # Before admission

    def promise(self, req: Any, tokens: array[int], end: int, exact_len: int) -> int:  # noqa: ANN401
        """Return how many tokens right behind the exact prefix can be loaded.

        Called in every scheduling round until the request is admitted; the plan is made again only if something changed.

        Args:
            req: SGLang's `Req`.
            tokens: Its prompt.
            end: Positions from it on are computed.
            exact_len: Length of the exact prefix.
        """
        self._is_empty = False
        flight = self._flights.get(req)
        if flight is None:
            namespace = request_namespace(self._fingerprint, req.lora_id, req.extra_key, req.cache_salt)
            flight = self._flights[req] = Flight(req.rid, namespace)
        miss = self._refused(req)
        if miss is not None:
            flight.num_tokens, flight.exact_len, flight.spans, flight.miss = len(tokens), exact_len, [], miss
            return 0
        decision = self._ranks.decide(lambda: self._decide(flight, req, tokens, end, exact_len))
        if decision.spans is not None:
            flight.spans = list(decision.spans)
        flight.num_tokens, flight.exact_len, flight.end = len(tokens), exact_len, end
        return sum(span.length for span in flight.stretch(exact_len))

    def _refused(self, req: Any) -> Miss | None:  # noqa: ANN401
        reason = refused_request(req)
        if reason is not None:
            return Miss(MissReason.MODEL_REFUSED, reason)
        return Miss(MissReason.REUSE_OFF, _STALE) if self._is_stale else None

    def promised(self, req: Any, exact_len: int) -> int:  # noqa: ANN401
        """Return what was promised for the same exact prefix, without looking anything up."""
        flight = self._flights.get(req)
        if flight is None or flight.exact_len != exact_len:
            return 0
        return sum(span.length for span in flight.stretch(exact_len))

    def _decide(self, flight: Flight, req: Any, tokens: array[int], end: int, exact_len: int) -> Decision:  # noqa: ANN401
        try:
            state = (self._library.version, len(tokens), end, exact_len)
            known = (flight.version, flight.num_tokens, flight.end, flight.exact_len)
            if state == known and self._is_there(flight.stretch(exact_len)):
                return Decision(None)
            plan = self._planner.plan(flight.namespace, tokens, exact_len, end)
            flight.version = self._library.version
            flight.miss, flight.lookup_ms = plan.miss, plan.lookup_ms
            spans = self._spans(plan)
            if not spans and not exact_len and self._semantic is not None:
                spans = self._semantic.spans(req, flight.namespace, tokens, end)
                flight.miss = None if spans else flight.miss
            return Decision(spans)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is computed instead
            flight.miss = self.log.failed("lookup", flight.rid, error)
            return Decision(())

    def _spans(self, plan: ReusePlan) -> tuple[Span, ...]:
        donor_of = self._library.catalogue.get
        return tuple(
            Span(region.target_start, region.length, donor_of(region.donor_id), region.donor_start, recomputed)
            for region, recomputed in zip(plan.regions, plan.recomputed, strict=True)
        )

    def _is_there(self, spans: Sequence[Span]) -> bool:
        return all(
            span.donor is not None and self._library.has(span.donor, span.donor_start, span.length) for span in spans
        )

    # Loading

    def load_first(self, req: Any, promised: int) -> int:  # noqa: ANN401
        """Load what touches the exact prefix, all that was promised or nothing; returns the number of tokens."""
        flight = self._flights.get(req)
        if flight is None:
            return 0
        slots = self._loader.load(flight, req.prefix_len, promised)
        if slots is None:
            return 0
        flight.private.append(slots)
        req.skip_radix_cache_insert = True  # approximate K/V are never published
        return len(slots)

    def private_slots(self, req: Any) -> list[Tensor]:  # noqa: ANN401
        """Return the slots that were loaded before the request had a row, in order."""
        flight = self._flights.get(req)
        return [] if flight is None else flight.private

    def next_gap(self, req: Any, position: int) -> int | None:  # noqa: ANN401
        """Return how many tokens to compute from `position` until the next region; None up to the end."""
        flight = self._flights.get(req)
        start = None if flight is None else flight.next_start(position)
        return None if start is None else start - position

    def load_next(self, req: Any, room: int) -> Tensor | None:  # noqa: ANN401
        """Load the regions that begin where the computed part ends.

        Args:
            req: SGLang's `Req`, between two chunks.
            room: Slots that may be taken without endangering running requests.

        Returns:
            The slots of the positions from `req.prefix_len` on, for the caller to write into the row; None for nothing.
        """
        flight = self._flights.get(req)
        if flight is None:
            return None
        flight.num_steps += 1
        flight.pass_by(req.prefix_len, self._min_run)
        total = sum(span.length for span in flight.stretch(req.prefix_len))
        if not total:
            return None
        slots = self._loader.load(flight, req.prefix_len, total if total <= room else -1)
        if slots is not None:
            req.skip_radix_cache_insert = True
        return slots

    # Publishing

    def published(self, req: Any, node: object) -> None:  # noqa: ANN401
        """Make donors of what `req` has given to the exact tree, once its prompt is complete."""
        flight = self._flights.get(req)
        if flight is None or self._refused(req) is not None:
            return
        if not req.finished() and not self._publisher.is_complete(req):
            return
        try:
            self._publisher.register_exact(req, flight, node)
            if req.finished() and self._semantic is not None:
                self._semantic.cached(req.rid, req.full_untruncated_fill_ids[: req.kv.cache_protected_len])
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", flight.rid, error)

    def adopt_computed(self, req: Any, row: Tensor, node: object) -> None:  # noqa: ANN401
        """Keep what a finished request computed behind copies, and the exact head in front of them, as donors.

        Args:
            req: SGLang's `Req`, about to be released.
            row: Its slots by position.
            node: Its node in the exact tree.
        """
        flight = self._flights.get(req)
        if flight is None or not flight.loaded or flight.adopted or flight.is_substituted or self._is_stale:
            return  # what saw another text's K/V is nobody's donor
        try:
            req.refresh_fill_ids()
            self._publisher.register_exact(req, flight, node)
            self._publisher.adopt_computed(req, flight, row)
        except Exception as error:  # noqa: BLE001 - logged and counted; the request is not harmed
            self.log.failed("register", flight.rid, error)

    def adopted(self, req: Any) -> list[tuple[int, int]]:  # noqa: ANN401
        """Return the ranges of the request's row that belong to the tree now."""
        flight = self._flights.get(req)
        return [] if flight is None else flight.adopted

    # The end

    def landed(self, req: Any) -> None:  # noqa: ANN401
        """The request gave its row back: finished, aborted or retracted."""
        flight = self._flights.pop(req, None)
        if flight is None:
            return
        if req.finished():
            self.log.finished(req, flight, self._planner.policy.name)
        else:
            attempts = (*flight.attempts, Attempt.of(flight, self._planner.policy.name))
            self._flights[req] = Flight(flight.rid, flight.namespace, attempts)

    def aborted(self, handle: object) -> None:
        """The request of a handle ended before it had a row, or its row is released next.

        A handle is told by identity: those of two requests of one id are equal.
        """
        for req, flight in list(self._flights.items()):
            if req.cache_request_handle is handle:
                del self._flights[req]
                self.log.aborted(flight, self._planner.policy.name)

    def evicted(self, freed: list[Tensor]) -> None:
        """Keep donors whose slots the tree has given up in host memory."""
        try:
            self._library.capture(freed)
        except Exception as error:  # noqa: BLE001 - logged and counted; the donors are lost
            self.log.failed("capture", "-", error)

    # Changes of everything

    def clear(self) -> None:
        """The cache was flushed, which SGLang does only while no request has K/V: what comes now is of today's weights."""
        self._forget()
        self._is_empty, self._is_stale = True, False

    def weights_change(self) -> None:
        """Whatever was computed so far, by a request that still runs too, was computed by other weights.

        SGLang's tree may keep such K/V, and requests may attend to them: nothing is copied or registered until it is flushed.
        """
        self._forget()
        if not self._is_empty and not self._is_stale:
            self._is_stale = True
            logger.warning("weights change: %s", _STALE)

    def _forget(self) -> None:
        """Forget all donors, and what was promised of them."""
        self._library.clear()
        for flight in self._flights.values():
            flight.spans = []
