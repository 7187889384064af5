"""What is promised to vLLM for a request: plans become claims, or misses where the engine could not keep them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.graft.select import Observable, PolicySteps, expected_share
from kvgraft.graft.sparse_prefill import selection_context
from kvgraft.integrations.vllm.scheduler.stores import is_cold
from kvgraft.types import GraftPlan, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.types import Match


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What was promised to vLLM for a request.

    Attributes:
        plan: Spans and computed positions of the prompt.
        end: Positions `[plan.exact_len, end)` are made by the workers.
        spans: What workers read of donors: the plan's spans, and in front of them text that sliding windows reach back to.
        donors: One per entry of `spans`.
        first_approximate: What stands in front of it is exact, and stays so if the load fails: exact spans are behind it.
        asynchronous: The request waits for it.
    """

    plan: GraftPlan
    end: int
    spans: tuple[Match, ...]
    donors: tuple[Donor, ...]
    first_approximate: int
    asynchronous: bool

    @property
    def num_tokens(self) -> int:
        """Tokens promised."""
        return self.end - self.plan.exact_len

    @property
    def source_starts(self) -> tuple[int, ...]:
        """Per entry of `spans` the position at which its first token was encoded."""
        return tuple(d.start_position + s.donor_start for s, d in zip(self.spans, self.donors, strict=True))

    @property
    def reached_back(self) -> tuple[Donor, ...]:
        """Donors of what sliding windows reach back to."""
        return self.donors[: len(self.donors) - len(self.plan.spans)]


class Claims:
    """Makes claims. Changes nothing."""

    def __init__(
        self, config: VLLMConfig, facts: EngineFacts, policy: SelectionPolicy, catalogue: DonorCatalogue
    ) -> None:
        self._load = config.load
        self._max_rows = config.max_recompute_tokens_per_step
        self._facts = facts
        self._policy = policy
        self._catalogue = catalogue

    def of(self, plan: GraftPlan, matches: Sequence[Match]) -> Claim | Miss:
        """Promise everything up to the end of the last span; the engine computes the rest with its own prefill."""
        spans, end = plan.spans, plan.spans[-1].target_end
        facts = self._facts
        first = plan.exact_len if facts.window else spans[0].target_start
        reaches_back = bool(facts.window and plan.exact_len)
        if reaches_back:
            front = covering(matches, max(0, plan.exact_len - facts.window + 1), plan.exact_len)
            if front is None:
                return Miss(MissReason.NO_MATCH, "no donor has the window in front of the exact prefix's end")
            spans = (*front, *spans)
        donors = tuple(donor for span in spans if (donor := self._catalogue.get(span.donor_id)) is not None)
        if len(donors) != len(spans):
            return Miss(MissReason.NO_DONORS, "a donor left during the lookup")
        asynchronous = {"sync": False, "async": True}.get(self._load, self._num_rows(plan, end) > self._max_rows)
        # A store is never waited for in a step that others share.
        asynchronous = asynchronous or any(is_cold(donor) for donor in donors)
        if len(facts.block_sizes) > 1:
            # On models with several KV groups only a waiting request can be told to start again, should its graft fail.
            asynchronous = facts.reports_failed_loads
            if reaches_back and not asynchronous:
                return Miss(
                    MissReason.MODEL_REFUSED, "this vLLM cannot take loads of models with several KV groups back"
                )
        return Claim(plan, end, spans, donors, first, asynchronous)

    def _num_rows(self, plan: GraftPlan, end: int) -> int:
        """Positions that workers compute, as far as it can be told beforehand."""
        if not plan.is_approximate:
            return int(np.searchsorted(plan.compute, end))
        observes = self._policy.observes
        if Observable.KEY_DEVIATION in observes:
            return end - plan.exact_len
        context, num_gap_rows = selection_context(plan), int(np.searchsorted(plan.compute, end))
        if Observable.QUERY_ATTENTION in observes:
            num_chosen = math.ceil(expected_share(self._policy) * len(context.reused))
            return num_gap_rows + num_chosen + plan.num_tokens - end  # rows behind the graft are run to look
        return num_gap_rows + len(PolicySteps(self._policy, context).first().positions)


def covering(matches: Sequence[Match], start: int, stop: int) -> tuple[Match, ...] | None:
    """Cut the parts of sorted, disjoint matches that cover `[start, stop)` without a gap; None if there is one."""
    parts = []
    position = start
    for match in matches:
        if match.target_end <= position or match.target_start >= stop:
            continue
        if match.target_start > position:
            return None
        parts.append(match.part(position, stop))
        position = parts[-1].target_end
    return tuple(parts) if position == stop else None
