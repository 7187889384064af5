"""Find donors for a prompt and decide what to graft, within a deadline. A failure is a counted miss, never an error."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.donors import plan_graft
from kvgraft.types import GraftPlan, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import CostModel
    from kvgraft.types import Match, Namespace

    Cut = Callable[[Sequence[Match], int, int], Sequence[Match]]
    """Shrinks matches to what an engine can load, given them, the exact prefix and the number of tokens."""

logger = logging.getLogger(__name__)

_REMEMBERED = 9
"""Lookups whose speed is remembered; an odd number, so that the median is one of them."""
_FADING = 0.5
"""What a refusal leaves of the expected time: a slow spell must not end reuse for good."""


class DonorFinder(Protocol):
    """What knows donors: `DonorCatalogue`, or a library around one that checks what is still there."""

    def __len__(self) -> int:
        """Number of donors."""

    def find(
        self,
        namespace: Namespace,
        token_ids: NDArray[np.integer[Any]],
        *,
        start: int = 0,
        max_generation: int | None = None,
    ) -> Sequence[Match]:
        """See `DonorCatalogue.find`."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The answer of a lookup.

    Attributes:
        planned: What to graft, or why nothing.
        matches: All matches that were found, also those that do not pay.
        lookup_ms: What it took.
    """

    planned: GraftPlan | Miss
    matches: tuple[Match, ...] = ()
    lookup_ms: float = 0.0


class Lookup:
    """Matches prompts and plans grafts. Not thread-safe.

    A lookup cannot be interrupted, so one that by experience (the median of the last ones, per token) would pass the deadline
    is not begun.
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
            clock: Seconds.
        """
        self.num_errors = 0
        self._donors = donors
        self._min_run = min_run
        self._max_generation = max_generation
        self._min_saved_tokens = min_saved_tokens
        self._deadline_ms = deadline_ms
        self._cut = cut
        self._clock = clock
        self._recent_ms_per_token: deque[float] = deque(maxlen=_REMEMBERED)

    def find(
        self,
        namespace: Namespace,
        token_ids: NDArray[np.integer[Any]],
        exact_len: int,
        costs: CostModel,
        *,
        start: int | None = None,
    ) -> Found:
        """Match and plan one prompt.

        Args:
            namespace: Whose donors may be used.
            token_ids: The prompt; its last token is always computed.
            exact_len: Tokens that the exact prefix cache gives.
            costs: What computing and copying cost.
            start: Matches in front of it are not looked for; None for `exact_len`.
        """
        if not len(self._donors):
            return Found(Miss(MissReason.NO_DONORS))
        expected_ms = self._expected_ms(len(token_ids))
        if expected_ms > self._deadline_ms:
            self._recent_ms_per_token.append(_FADING * median(self._recent_ms_per_token))
            return Found(Miss(MissReason.DEADLINE, f"a lookup would take about {expected_ms:.0f} ms"))
        started = self._clock()
        try:
            matches = tuple(
                self._donors.find(
                    namespace,
                    token_ids,
                    start=exact_len if start is None else start,
                    max_generation=self._max_generation,
                )
            )
            planned = self._plan(matches, exact_len, len(token_ids), costs)
        except Exception as error:
            self.num_errors += 1
            logger.exception("a lookup failed; the request is computed instead")
            return Found(Miss(MissReason.ERROR, f"{type(error).__name__}: {error}"))
        lookup_ms = (self._clock() - started) * 1e3
        self._recent_ms_per_token.append(lookup_ms / max(1, len(token_ids)))
        return Found(planned, matches, lookup_ms)

    def _expected_ms(self, num_tokens: int) -> float:
        recent = self._recent_ms_per_token
        return median(recent) * num_tokens if recent else 0.0

    def _plan(self, matches: Sequence[Match], exact_len: int, num_tokens: int, costs: CostModel) -> GraftPlan | Miss:
        usable = matches if self._cut is None else self._cut(matches, exact_len, num_tokens)
        if matches and not usable:
            return Miss(MissReason.NOT_WORTH_IT, "the matches are too short for this engine to load")
        planned = plan_graft(num_tokens, exact_len, usable, costs, min_run=self._min_run)
        if isinstance(planned, Miss):
            return planned
        saved = planned.reused_len * (1 - costs.recompute_ratio)
        saved -= costs.tail_passes * (num_tokens - planned.spans[-1].target_end)
        if saved < self._min_saved_tokens:
            return Miss(MissReason.NOT_WORTH_IT, f"{saved:.0f} tokens saved are less than min_saved_tokens")
        return planned
