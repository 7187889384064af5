"""Find donors for a prompt and decide what to graft, within a deadline. A failure is a counted miss, never an error."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.donors import DonorQuery, plan_graft
from kvgraft.reuse.failures import miss_of
from kvgraft.types import GraftPlan, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import CostModel
    from kvgraft.types import DonorId, Match, Namespace

    Cut = Callable[[Sequence[Match], int, int], Sequence[Match]]
    """Shrinks matches to what an engine can load, given them, the exact prefix and the number of tokens."""

    ReadCost = Callable[[Match], float]
    """Cost of getting the K/V of a match; see `plan_graft`."""

logger = logging.getLogger(__name__)

_REMEMBERED = 9
"""Lookups that the expected time is drawn from; an odd number, so that the median is one of them."""
_FADING = 0.5
"""Share that a refusal leaves of the expected time: a slow spell must not end reuse for good."""


class DonorFinder(Protocol):
    """A search for donors: `DonorCatalogue`, or a wrapper of one that checks what is still there."""

    def __len__(self) -> int:
        """Number of donors."""

    def find(self, query: DonorQuery) -> Sequence[Match]:
        """See `DonorCatalogue.find`."""


class Proposer(Protocol):
    """A source of donors that the indexes of a `DonorFinder` may have lost. Proposals are compared token by token."""

    def propose(self, namespace: Namespace, token_ids: NDArray[np.integer[Any]]) -> Collection[DonorId]:
        """Name a few donors that resemble a prompt, without waiting; wrong or old ones do no harm."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The answer of a lookup."""

    planned: GraftPlan | Miss
    matches: tuple[Match, ...] = ()
    """All matches that were found, also those that do not pay."""
    lookup_ms: float = 0.0


@dataclass(slots=True)
class ProposerCounters:
    """Counters of a proposer."""

    donors: int = 0
    """Donors that it named."""
    tokens: int = 0
    """Matched tokens that the indexes alone would not have found."""


class Lookup:
    """Matches prompts and plans grafts. Not thread-safe.

    A proposer is asked only where matches leave more than the shortest run of a prompt to compute. What it names is looked at
    in a second search. Where a match would have to be read, resident donors are searched once more: matches in stores that
    fill what these leave out may save more than the longest matches.

    A lookup cannot be interrupted, so one that by experience (the median of the last ones, per token) would pass the deadline
    is not begun.

    Attributes:
        max_generation: Highest generation of a donor.
    """

    def __init__(
        self,
        donors: DonorFinder,
        *,
        min_run: int,
        max_generation: int,
        min_saved_tokens: int = 0,
        deadline_ms: float = math.inf,
        cut: Cut | None = None,
        proposer: Proposer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare.

        Args:
            donors: Where donors are.
            min_run: Shortest run of equal tokens that is reused.
            max_generation: Highest generation of a donor.
            min_saved_tokens: Least tokens that a graft must save on balance.
            deadline_ms: Longest that a lookup may take; infinite where plans must depend on nothing but prompt and donors, as
                on the ranks of one server, each of which looks up for itself.
            cut: Shrinks matches to what the engine can load; None if it can load any.
            proposer: Names donors that the indexes may have lost; None for none. Not where plans must depend on nothing but
                prompt and donors: it answers when it is ready.
            clock: Seconds.
        """
        self.num_errors = 0
        self.proposals = ProposerCounters()
        self._proposer = proposer
        self._donors = donors
        self._min_run = min_run
        self.max_generation = max_generation
        self._min_saved_tokens = min_saved_tokens
        self._deadline_ms = deadline_ms
        self._cut = cut
        self._clock = clock
        self._recent_ms_per_token: deque[float] = deque(maxlen=_REMEMBERED)

    def find(
        self,
        namespace: Namespace,
        token_ids: NDArray[np.integer[Any]],
        prefix_len: int,
        costs: CostModel,
        *,
        start: int | None = None,
        read_cost: ReadCost | None = None,
    ) -> Found:
        """Match and plan one prompt.

        Args:
            namespace: Only its donors may be used.
            token_ids: The prompt; its last token is always computed.
            prefix_len: Tokens that have their K/V already: of the exact prefix, and of what the prompt goes on from.
            costs: What computing and copying cost.
            start: Matches before it are not looked for; None for `prefix_len`.
            read_cost: Cost of reading a match besides, in the unit of `costs`, above 0 unless it is resident; called several
                times. None for resident donors alone.
        """
        if not len(self._donors):
            return Found(Miss(MissReason.NO_DONORS))
        expected_ms = self._expected_ms(len(token_ids))
        if expected_ms > self._deadline_ms:
            self._recent_ms_per_token.append(_FADING * median(self._recent_ms_per_token))
            return Found(Miss(MissReason.DEADLINE, f"a lookup would take about {expected_ms:.0f} ms"))
        started = self._clock()
        try:
            first = prefix_len if start is None else start
            query = DonorQuery(namespace, token_ids, first, self.max_generation, with_stored=read_cost is not None)
            matches = self._matches(query, namespace, token_ids)
            planned = self._plan(matches, prefix_len, len(token_ids), costs, read_cost)
            if read_cost is not None and _might_read(matches, prefix_len, read_cost):
                resident = self._donors.find(replace(query, with_stored=False))
                between = _between(matches, resident, self._min_run)
                filled = sorted([*resident, *between], key=lambda match: match.target_start)
                other = self._plan(filled, prefix_len, len(token_ids), costs, read_cost)
                planned = max(planned, other, key=lambda plan: _saved(plan, costs, read_cost))
        except Exception as error:
            self.num_errors += 1
            logger.exception("a lookup failed; the request is computed instead")
            return Found(miss_of(error))
        lookup_ms = (self._clock() - started) * 1e3
        self._recent_ms_per_token.append(lookup_ms / max(1, len(token_ids)))
        return Found(planned, matches, lookup_ms)

    def _matches(
        self, query: DonorQuery, namespace: Namespace, token_ids: NDArray[np.integer[Any]]
    ) -> tuple[Match, ...]:
        """Matches of the indexes, and where these leave much out, with what is proposed."""
        matches = tuple(self._donors.find(query))
        covered = sum(match.length for match in matches)
        if self._proposer is None or len(token_ids) - query.start - covered <= self._min_run:
            return matches
        proposed = self._proposed(self._proposer, namespace, token_ids)
        if not proposed:
            return matches
        more = tuple(self._donors.find(replace(query, proposed=proposed)))
        found = sum(match.length for match in more) - covered
        self.proposals.donors += len(proposed)
        self.proposals.tokens += max(0, found)
        return more if found > 0 else matches

    def _proposed(
        self, proposer: Proposer, namespace: Namespace, token_ids: NDArray[np.integer[Any]]
    ) -> Collection[DonorId]:
        """Ask the proposer; one that fails proposes nothing."""
        try:
            return proposer.propose(namespace, token_ids)
        except Exception:
            self.num_errors += 1
            logger.exception("a proposer failed; donors of the indexes are used alone")
            return ()

    def _expected_ms(self, num_tokens: int) -> float:
        recent = self._recent_ms_per_token
        return median(recent) * num_tokens if recent else 0.0

    def _plan(
        self,
        matches: Sequence[Match],
        prefix_len: int,
        num_tokens: int,
        costs: CostModel,
        read_cost: ReadCost | None,
    ) -> GraftPlan | Miss:
        usable = matches if self._cut is None else self._cut(matches, prefix_len, num_tokens)
        if matches and not usable:
            return Miss(MissReason.NOT_WORTH_IT, "the matches are too short for this engine to load")
        planned = plan_graft(num_tokens, prefix_len, usable, costs, min_run=self._min_run, read_cost=read_cost)
        if isinstance(planned, Miss):
            return planned
        saved = float(planned.reused_len)
        if planned.has_shifted:
            saved -= costs.recompute_ratio * sum(span.length for span in planned.spans if span.is_shifted)
        if saved < self._min_saved_tokens:
            return Miss(MissReason.NOT_WORTH_IT, f"{saved:.0f} tokens saved are less than min_saved_tokens")
        return planned


def _might_read(matches: Sequence[Match], prefix_len: int, read_cost: ReadCost) -> bool:
    """Tell whether K/V after the exact prefix would have to be read; alike on ranks that measure different costs."""
    return any(read_cost(match) > 0 for match in matches if match.target_end > prefix_len)


def _between(matches: Sequence[Match], taken: Sequence[Match], min_run: int) -> Iterator[Match]:
    """Yield the parts of `matches` outside of `taken` that are long enough; both are sorted and disjoint."""
    for match in matches:
        start = match.target_start
        ends = [(each.target_start, each.target_end) for each in taken if each.target_end > start]
        for first, last in (*ends, (match.target_end, match.target_end)):
            stop = min(first, match.target_end)
            if stop - start >= min_run:
                yield match.part(start, stop)
            start = max(start, last)


def _saved(planned: GraftPlan | Miss, costs: CostModel, read_cost: ReadCost) -> float:
    """Return what a plan saves, less the cost of its reads; minus infinity for a miss."""
    if isinstance(planned, Miss):
        return -math.inf
    saved = sum(
        costs.saving(span.target_start, span.target_end, is_shifted=span.is_shifted) - read_cost(span)
        for span in planned.spans
    )
    return saved - costs.look_cost(planned)
