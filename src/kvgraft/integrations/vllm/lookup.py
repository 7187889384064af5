"""Find donors for a prompt and decide what to graft, within a deadline. Runs on vLLM's scheduler thread."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from kvgraft.donors import CostModel, plan_graft
from kvgraft.types import Match, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import DonorCatalogue
    from kvgraft.types import GraftPlan, Namespace

_REMEMBERED = 9
_FADING = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """The answer of a lookup.

    Attributes:
        planned: What to graft, or why nothing.
        matches: All matches, also in front of the exact prefix and those that do not pay.
        lookup_ms: What it took.
    """

    planned: GraftPlan | Miss
    matches: tuple[Match, ...]
    lookup_ms: float


class Lookup:
    """Looks prompts up and remembers how long the last ones took.

    A lookup cannot be interrupted, so one that by experience (the median) would pass the deadline is not begun. Every
    refusal lets the experience fade, so that a slow spell does not end reuse.
    """

    def __init__(self, catalogue: DonorCatalogue, config: VLLMConfig, recompute_ratio: float, width: int) -> None:
        """Prepare.

        Args:
            catalogue: Where donors are.
            config: Limits.
            recompute_ratio: What the selection policy computes again.
            width: Hidden size of the model, for the share of attention in the cost of a token.
        """
        self._catalogue = catalogue
        self._config = config
        self._recent_ms_per_token: deque[float] = deque(maxlen=_REMEMBERED)
        self._costs = CostModel.of_width(width, recompute_ratio=recompute_ratio)

    def find(self, namespace: Namespace, token_ids: NDArray[np.int32], exact_len: int) -> Found:
        """Match and plan; `exact_len` tokens are in vLLM's prefix cache."""
        if not len(self._catalogue):
            return Found(Miss(MissReason.NO_DONORS), (), 0.0)
        recent = self._recent_ms_per_token
        expected_ms = (median(recent) if recent else 0.0) * len(token_ids)
        if expected_ms > self._config.lookup_deadline_ms:
            recent.append(_FADING * median(recent))
            return Found(Miss(MissReason.DEADLINE, f"a lookup would take about {expected_ms:.0f} ms"), (), 0.0)
        started = time.perf_counter()
        matches = self._catalogue.find(namespace, token_ids, max_generation=self._config.max_generation)
        planned = plan_graft(len(token_ids), exact_len, matches, self._costs, min_run=self._config.min_run)
        if not isinstance(planned, Miss):
            planned = self._worthwhile(planned)
        lookup_ms = (time.perf_counter() - started) * 1e3
        recent.append(lookup_ms / len(token_ids))
        return Found(planned, tuple(matches), lookup_ms)

    def _worthwhile(self, plan: GraftPlan) -> GraftPlan | Miss:
        saved = plan.reused_len * (1 - self._costs.recompute_ratio)
        if saved >= self._config.min_saved_tokens:
            return plan
        return Miss(MissReason.NOT_WORTH_IT, f"{saved:.0f} tokens saved are less than min_saved_tokens")


def covering(matches: Sequence[Match], start: int, stop: int) -> tuple[Match, ...] | None:
    """Cut the parts of sorted, disjoint matches that cover `[start, stop)` without a gap; None if there is one."""
    parts = []
    position = start
    for match in matches:
        if match.target_end <= position or match.target_start >= stop:
            continue
        if match.target_start > position:
            return None
        end = min(match.target_end, stop)
        parts.append(Match(position, match.donor_id, match.donor_start + position - match.target_start, end - position))
        position = end
    return tuple(parts) if position == stop else None


def covered_head(matches: Sequence[Match]) -> int:
    """How many tokens from the first on matches cover without a gap."""
    position = 0
    for match in matches:
        if match.target_start > position:
            break
        position = match.target_end
    return position
