"""Decisions for one prompt: the runs to load, and from which donors. Reads donors, changes nothing."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select import NoRecompute, Observable
from kvgraft.integrations.sglang.planning.regions import loadable
from kvgraft.integrations.sglang.planning.spans import LoadDecision, LoadSpan
from kvgraft.reuse.lookup import Lookup
from kvgraft.reuse.policy import configured_policy
from kvgraft.reuse.stored import is_stored
from kvgraft.types import GraftPlan, Match, Miss, MissReason, Namespace

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from kvgraft.config.sglang import SGLangConfig
    from kvgraft.donors import CostModel
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.sglang.donors.keeper import DonorKeeper
    from kvgraft.integrations.sglang.recompute.recomputer import Recomputer
    from kvgraft.integrations.sglang.stored.link import StoreLink
    from kvgraft.types import DonorId


SHOWN = frozenset({Observable.QUERY_ATTENTION})
"""What a policy can observe here."""


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
    """Return how many tokens `plan` moves from elsewhere, and how many stand after the last of them."""
    shifted = [span for span in plan.spans if span.is_shifted]
    return sum(span.length for span in shifted), plan.num_tokens - shifted[-1].target_end


class LoadPlanner:
    """Plans one prompt at a time: the lookup of all engines, cut to what SGLang can load. Not thread-safe."""

    def __init__(
        self,
        keeper: DonorKeeper,
        config: SGLangConfig,
        costs: CostModel,
        page_size: int,
        *,
        recomputer: Recomputer | None = None,
        stores: StoreLink | None = None,
        has_deadline: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Build a planner over a keeper and stores, for pages of `page_size` tokens.

        Without a `recomputer`, tokens that the policy of `config` chooses are left to SGLang. Without a deadline, plans
        depend on nothing but their arguments and the donors.
        """
        self.policy = chosen_policy(config)
        self._recomputer = recomputer
        self._left_out: SelectionPolicy = self.policy if recomputer is None else NoRecompute()
        self._keeper, self._stores = keeper, stores
        self._costs = costs
        self._page_size = page_size
        self._min_run = config.min_run
        self._recomputed: dict[tuple[DonorId, int], int] = {}
        self._lookup = Lookup(
            keeper,
            min_run=config.min_run,
            max_generation=config.max_generation,
            deadline_ms=config.lookup_deadline_ms if has_deadline else math.inf,
            cut=self._cut,
            clock=clock,
        )

    def plan(
        self, namespace: Namespace, tokens: array[int], prefix_len: int, end: int, *, may_read: bool = False
    ) -> LoadDecision:
        """Plan the positions `[prefix_len, end)` of a prompt; donors in stores count if it `may_read`."""
        token_ids = np.frombuffer(tokens[: end + 1], np.int64)
        self._recomputed.clear()
        read_cost = self._stores.read_cost if may_read and self._stores is not None else None
        found = self._lookup.find(namespace, token_ids, prefix_len, self._costs, read_cost=read_cost)
        if isinstance(found.planned, Miss):
            return LoadDecision((), found.planned, found.lookup_ms)
        recomputer = self._recomputer if found.planned.has_shifted else None
        if recomputer is not None and recomputer.policy_for(*extent(found.planned)) is None:
            miss = Miss(MissReason.NOT_WORTH_IT, "computing chosen tokens again costs more than the copy saves")
            return LoadDecision((), miss, found.lookup_ms)
        return LoadDecision(tuple(map(self._span, found.planned.spans)), None, found.lookup_ms)

    def _cut(self, matches: Sequence[Match], prefix_len: int, num_tokens: int) -> Sequence[Match]:
        regions, recomputed = loadable(
            matches,
            start=prefix_len,
            end=num_tokens - 1,
            page_size=self._page_size,
            policy=self._left_out,
            min_run=self._min_run,
        )
        self._recomputed |= {
            (region.donor_id, region.target_start): recomputed[region.target_start] for region in regions
        }
        return regions

    def _span(self, region: Match) -> LoadSpan:
        donor = self._keeper.catalogue.get(region.donor_id)
        recomputed = self._recomputed[region.donor_id, region.target_start]
        return LoadSpan(
            region.target_start,
            region.length,
            donor,
            region.donor_start,
            recomputed,
            region.fidelity,
            is_stored=is_stored(donor),
        )
