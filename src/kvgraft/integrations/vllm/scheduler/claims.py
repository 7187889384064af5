"""Promises to vLLM: plans become claims, or misses where the engine could not keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.scheduler.repair_time import RepairTimes
from kvgraft.reuse.claim import Claim
from kvgraft.reuse.decision import Decision
from kvgraft.reuse.stored import is_stored
from kvgraft.types import Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.reuse.repair_time import RepairPlan
    from kvgraft.types import DonorId, GraftPlan, Match, Substitution


class Claims:
    """Makes claims; changes nothing.

    Attributes:
        repair_times: When choices of the policy are computed.
    """

    def __init__(
        self,
        config: VLLMConfig,
        facts: EngineFacts,
        policy: SelectionPolicy,
        catalogue: DonorCatalogue,
        tier_of: Callable[[DonorId], str],
    ) -> None:
        self._load = config.load
        self._max_rows = config.max_recompute_tokens_per_step
        self.repair_times = RepairTimes(policy, facts, max_rows=self._max_rows, below_margin=config.repair_below_margin)
        self._facts = facts
        self._policy = policy
        self._catalogue = catalogue
        self._tier_of = tier_of

    def of(
        self,
        plan: GraftPlan,
        token_ids: NDArray[np.integer],
        matches: Sequence[Match],
        substitution: Substitution | None = None,
        repair: RepairPlan | None = None,
    ) -> Claim | Miss:
        """Promise everything up to `RepairTimes.end_of`; the engine computes the rest with its own prefill."""
        facts, end = self._facts, self.repair_times.end_of(plan, repair)
        first = plan.prefix_len if facts.window else plan.spans[0].target_start
        reach = min(facts.window, plan.prefix_len + 1) - 1
        front = covering(matches, plan.prefix_len - reach, plan.prefix_len) if reach > 0 else ()
        if front is None:
            return Miss(MissReason.NO_MATCH, "no donor has the window before the end of the exact prefix")
        front_donors, donors = self._donors(front), self._donors(plan.spans)
        if len(front_donors) + len(donors) != len(front) + len(plan.spans):
            return Miss(MissReason.NO_DONORS, "a donor left during the lookup")
        num_rows = self.repair_times.num_rows(plan, token_ids, repair)
        asynchronous = {"sync": False, "async": True}.get(self._load, num_rows > self._max_rows)
        # A store is never waited for in a step that others share; of models with several KV groups, and on a GPU by default
        # (`runner.py`), vLLM takes back what a waiting request could not load, and nothing else.
        is_read = any(is_stored(donor) for donor in (*front_donors, *donors))
        asynchronous = asynchronous or is_read or len(facts.block_sizes) > 1 or not facts.takes_running_back
        policy = None if substitution is not None else self._policy
        tiers = tuple(self._tier_of(donor.donor_id) for donor in donors)
        decision = Decision(plan, donors=donors, tiers=tiers, policy=policy, substitution=substitution)
        num_repair_rows = self.repair_times.num_rows_after(plan, token_ids, repair)
        return Claim(decision, end, front, front_donors, first, asynchronous, num_rows, repair, num_repair_rows)

    def _donors(self, spans: Iterable[Match]) -> tuple[Donor, ...]:
        """Return the donors of spans that are still there."""
        return tuple(donor for span in spans if (donor := self._catalogue.get(span.donor_id)) is not None)


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


def covered_to(matches: Iterable[Match], start: int = 0) -> int:
    """Return the end of the positions from `start` on that sorted, disjoint matches cover without a gap."""
    for match in matches:
        if match.target_start > start:
            break
        start = max(start, match.target_end)
    return start
