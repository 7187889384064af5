"""Contents and work of an engine, request by request and text by text, for the inspector's page."""

from __future__ import annotations

import time
from dataclasses import dataclass
from heapq import nlargest
from typing import TYPE_CHECKING

from kvgraft.engine.schedule.active import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.engine.core import Engine
    from kvgraft.engine.requests.risk import AuditFacts
    from kvgraft.engine.schedule.active import ActiveRequest
    from kvgraft.prefix import OutlineNode

_MOST_REQUESTS = 200
_MOST_DONORS = 200
_MOST_NODES = 1000


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that has no answer yet, or not all of it.

    Attributes:
        state: `waiting`, `loading` (from a store), `prefill` or `decode`.
        reused_tokens: Prompt tokens that are not computed; 0 while it waits.
        age_s: Seconds since it arrived.
    """

    request_id: str
    state: str
    prompt_tokens: int
    reused_tokens: int
    output_tokens: int
    age_s: float


@dataclass(frozen=True, slots=True)
class DonorFacts:
    """A donor without its text.

    Attributes:
        tier: `device`, `host` or the name of a store.
        value: Tokens saved per token held, the registration counted as one use.
        saved_tokens: Tokens that requests copied instead of computing them.
        generation: Grafts that its K/V attended to; 0 for exact K/V.
    """

    donor_id: int
    num_tokens: int
    tier: str
    value: float
    saved_tokens: int
    generation: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """An engine between two steps; holds no text.

    Attributes:
        requests: Those on their way, running ones first; the first 200.
        num_requests: All of them.
        donors: The most valuable 200, in descending order.
        num_donors: All of them.
        prefixes: The tree of exact prefixes, up to 1,000 nodes from the root on; empty where the cache is no tree.
        audits: The last 50 audits, the newest first.
    """

    requests: tuple[LiveRequest, ...]
    num_requests: int
    donors: tuple[DonorFacts, ...]
    num_donors: int
    prefixes: tuple[OutlineNode, ...]
    audits: tuple[AuditFacts, ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> Inspection:
        """Look at an engine; on its thread, between steps. O(donors + requests)."""
        live = list(_live(engine))
        return cls(
            tuple(live[:_MOST_REQUESTS]),
            len(live),
            tuple(_donors(engine)),
            len(engine.space.donors),
            tuple(engine.space.prefix.outline(_MOST_NODES)),
            tuple(reversed(engine.risk.latest)),
        )


def _live(engine: Engine) -> Iterator[LiveRequest]:
    now = time.perf_counter()
    scheduler = engine.scheduler
    for active in (*scheduler.running, *scheduler.loading, *scheduler.waiting):
        yield _facts(active, now)


def _facts(active: ActiveRequest, now: float) -> LiveRequest:
    request, report = active.request, active.report
    state = Phase.PREFILL if active.is_prefilling else active.phase
    reused = 0 if report is None else report.reused_tokens
    age_s = now - request.arrival
    return LiveRequest(request.request_id, state.value, len(request.token_ids), reused, len(active.output_ids), age_s)


def _donors(engine: Engine) -> Iterator[DonorFacts]:
    donors = engine.space.donors
    for donor in nlargest(_MOST_DONORS, donors, key=lambda donor: donors.value(donor.donor_id)):
        yield DonorFacts(
            int(donor.donor_id),
            donor.num_tokens,
            engine.space.tier_of(donor),
            donors.value(donor.donor_id),
            donors.saved_tokens(donor.donor_id),
            donor.generation,
        )
