"""Decide for one prompt which runs are loaded from where. Reads donors, changes nothing."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.donors import plan_graft
from kvgraft.integrations.sglang.regions import loadable
from kvgraft.reuse.policy import configured_policy
from kvgraft.types import Match, Miss, MissReason, Namespace

if TYPE_CHECKING:
    from array import array

    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.donors import CostModel
    from kvgraft.integrations.sglang.donor_library import DonorLibrary

_RATE_MEMORY = 0.8
"""How much of the measured lookup speed is kept when a new lookup is measured."""


@dataclass(frozen=True, slots=True)
class ReusePlan:
    """What to load for a prompt.

    Attributes:
        regions: Sorted, disjoint, whole pages behind the exact prefix.
        miss: Why there are none, or None.
        recomputed: By region, tokens in front of it that the selection policy had computed again.
        lookup_ms: Time that it took.
    """

    regions: tuple[Match, ...] = ()
    miss: Miss | None = None
    recomputed: tuple[int, ...] = ()
    lookup_ms: float = 0.0


def request_namespace(
    fingerprint: str, lora_id: str | None, extra_key: str | None, cache_salt: str | None
) -> Namespace:
    """Return who may share K/V with a request: same model, adapter, `extra_key` and `cache_salt`."""
    return Namespace(fingerprint, lora_id or "", json.dumps([extra_key, cache_salt]))


class ReusePlanner:
    """Plans one prompt at a time within a deadline. Not thread-safe."""

    def __init__(
        self,
        library: DonorLibrary,
        config: SGLangConfig,
        costs: CostModel,
        page_size: int,
        *,
        has_deadline: bool = True,
    ) -> None:
        """Build a planner; without a deadline plans depend on nothing but their arguments and the donors."""
        self.policy = configured_policy(config.selection, first_k=config.first_k)
        self._library = library
        self._costs = costs
        self._page_size = page_size
        self._min_run = config.min_run
        self._deadline_s = config.lookup_deadline_ms / 1e3 if has_deadline else math.inf
        self._seconds_per_token = 0.0

    def plan(self, namespace: Namespace, tokens: array[int], exact_len: int, end: int) -> ReusePlan:
        """Plan the positions `[exact_len, end)` of a prompt.

        Args:
            namespace: Whose donors may be used.
            tokens: The prompt.
            exact_len: Tokens that the exact prefix cache gives.
            end: Positions from it on are computed.
        """
        if not len(self._library.catalogue):
            return ReusePlan(miss=Miss(MissReason.NO_DONORS))
        if self._seconds_per_token * end > self._deadline_s:
            self._seconds_per_token *= _RATE_MEMORY  # one slow lookup must not end all that follow
            return ReusePlan(miss=Miss(MissReason.DEADLINE, f"a lookup in {end} tokens would take too long"))
        started = time.perf_counter()
        token_ids = np.frombuffer(tokens[:end], np.int64)
        matches = self._library.find(namespace, token_ids, exact_len)
        plan = self._choose(matches, exact_len, end)
        elapsed = time.perf_counter() - started
        self._seconds_per_token = _RATE_MEMORY * self._seconds_per_token + (1 - _RATE_MEMORY) * elapsed / max(end, 1)
        return ReusePlan(plan.regions, plan.miss, plan.recomputed, 1e3 * elapsed)

    def _choose(self, matches: list[Match], exact_len: int, end: int) -> ReusePlan:
        regions, recomputed = loadable(
            matches,
            start=exact_len,
            end=end,
            page_size=self._page_size,
            policy=self.policy,
            min_run=self._min_run,
        )
        if matches and not regions:
            return ReusePlan(miss=Miss(MissReason.NOT_WORTH_IT, "matches are too short to be loaded as whole pages"))
        planned = plan_graft(end + 1, exact_len, regions, self._costs, min_run=self._min_run)
        if isinstance(planned, Miss):
            return ReusePlan(miss=planned)
        return ReusePlan(planned.spans, None, tuple(recomputed[span.target_start] for span in planned.spans))
