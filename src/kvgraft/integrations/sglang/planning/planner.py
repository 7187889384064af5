"""Decide for one prompt which runs are loaded from where. Reads donors, changes nothing."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select import NoRecompute, Observable
from kvgraft.integrations.sglang.planning.regions import loadable
from kvgraft.integrations.sglang.planning.spans import Span
from kvgraft.integrations.sglang.stored.cold import AllDonors, is_cold
from kvgraft.reuse.lookup import Lookup
from kvgraft.reuse.policy import configured_policy
from kvgraft.types import Fidelity, GraftPlan, Match, Miss, MissReason, Namespace

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.donors import CostModel, Donor
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.sglang.donors.library import DonorLibrary
    from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
    from kvgraft.integrations.sglang.stored.link import StoreLink
    from kvgraft.reuse.lookup import DonorFinder
    from kvgraft.types import DonorId


SHOWN = frozenset({Observable.QUERY_ATTENTION})
"""What a policy can be shown here."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load for a prompt.

    Attributes:
        spans: Ascending, disjoint, whole pages behind the exact prefix.
        miss: Why there are none, or None.
        lookup_ms: Time that it took.
    """

    spans: tuple[Span, ...]
    miss: Miss | None
    lookup_ms: float


def request_namespace(
    fingerprint: str, lora_id: str | None, extra_key: str | None, cache_salt: str | None
) -> Namespace:
    """Return who may share K/V with a request: same model, adapter, `extra_key` and `cache_salt`."""
    return Namespace(fingerprint, lora_id or "", json.dumps([extra_key, cache_salt]))


def chosen_policy(config: SGLangConfig) -> SelectionPolicy:
    """Return the policy that settings name."""
    return configured_policy(
        config.selection, first_k=config.first_k, recompute_ratio=config.recompute_ratio, shown=SHOWN
    )


def extent(plan: GraftPlan) -> tuple[int, int]:
    """Return how many tokens `plan` copies that are approximate, and how many stand behind the last of them."""
    approximate = [span for span in plan.spans if not span.is_exact]
    return sum(span.length for span in approximate), plan.num_tokens - approximate[-1].target_end


class LoadPlanner:
    """Plans one prompt at a time: the lookup of all engines, cut to what SGLang can load. Not thread-safe."""

    def __init__(
        self,
        library: DonorLibrary,
        config: SGLangConfig,
        costs: CostModel,
        page_size: int,
        *,
        recomputer: Recomputer | None = None,
        stores: StoreLink | None = None,
        has_deadline: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build a planner.

        Args:
            library: Donors.
            config: Names the policy.
            costs: What computing, copying and steps cost.
            page_size: Tokens of a page.
            recomputer: Computes again what the policy chooses once it is loaded; None where nobody does, and what the policy
                chooses must be left to SGLang.
            stores: Where more donors are; None for nowhere.
            has_deadline: Without one plans depend on nothing but their arguments and the donors.
            clock: Seconds.
        """
        self.policy = chosen_policy(config)
        self._recomputer = recomputer
        self._left_out: SelectionPolicy = self.policy if recomputer is None else NoRecompute()
        self._catalogue, self._cold = library.catalogue, None if stores is None else stores.cold
        self._costs = costs
        self._page_size = page_size
        self._min_run = config.min_run
        self._recomputed: dict[int, int] = {}
        lookup = partial(
            Lookup,
            min_run=config.min_run,
            max_generation=config.max_generation,
            refresh_after=config.refresh_after,
            deadline_ms=config.lookup_deadline_ms if has_deadline else math.inf,
            cut=self._cut,
            clock=clock,
        )
        self._at_hand = lookup(library)
        everywhere: DonorFinder = library if stores is None else AllDonors(library, stores.cold, stores, config.min_run)
        self._everywhere = lookup(everywhere)

    def plan(
        self, namespace: Namespace, tokens: array[int], exact_len: int, end: int, *, may_read: bool = False
    ) -> LoadPlan:
        """Plan the positions `[exact_len, end)` of a prompt.

        Args:
            namespace: Whose donors may be used.
            tokens: The prompt.
            exact_len: Tokens that the exact prefix cache gives.
            end: Positions from it on are computed.
            may_read: Whether donors in stores count.
        """
        token_ids = np.frombuffer(tokens[: end + 1], np.int64)
        lookup = self._everywhere if may_read else self._at_hand
        found = lookup.find(namespace, token_ids, exact_len, self._costs)
        if isinstance(found.planned, Miss):
            return LoadPlan((), found.planned, found.lookup_ms)
        recomputer = self._recomputer if found.planned.is_approximate else None
        if recomputer is not None and recomputer.policy_for(*extent(found.planned)) is None:
            miss = Miss(MissReason.NOT_WORTH_IT, "computing chosen tokens again costs more than the copy saves")
            return LoadPlan((), miss, found.lookup_ms)
        return LoadPlan(tuple(map(self._span, found.planned.spans)), None, found.lookup_ms)

    def reset(self) -> None:
        """All donors are forgotten."""
        self._at_hand.reset()
        self._everywhere.reset()

    def _cut(self, matches: Sequence[Match], exact_len: int, num_tokens: int) -> Sequence[Match]:
        regions, self._recomputed = loadable(
            matches,
            start=exact_len,
            end=num_tokens - 1,
            page_size=self._page_size,
            policy=self._left_out,
            min_run=self._min_run,
        )
        return regions

    def _span(self, region: Match) -> Span:
        is_stored = is_cold(region.donor_id)
        donor = self.donor_of(region.donor_id)
        recomputed = self._recomputed[region.target_start]
        fidelity = Fidelity.EXACT if region.is_exact else Fidelity.SHIFTED
        return Span(
            region.target_start, region.length, donor, region.donor_start, recomputed, fidelity, is_stored=is_stored
        )

    def donor_of(self, donor_id: DonorId) -> Donor | None:
        """Return a donor at hand or in a store, or None if it is gone."""
        if not is_cold(donor_id):
            return self._catalogue.get(donor_id)
        return None if self._cold is None else self._cold.get(donor_id)
