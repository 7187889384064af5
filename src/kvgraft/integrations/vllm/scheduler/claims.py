"""Promises to vLLM: plans become claims, or misses where the engine could not keep them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.integrations.vllm.scheduler.repair_time import RepairTimes
from kvgraft.memory.store import HOST
from kvgraft.reuse.decision import Decision
from kvgraft.reuse.lineage import copied_generation
from kvgraft.reuse.stored import is_stored
from kvgraft.types import Miss, MissReason, RepairTime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
    from kvgraft.types import DonorId, GraftPlan, Match, RepairReport, Substitution


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A graft that is promised to vLLM.

    Attributes:
        decision: What is copied for the prompt, and from which donors.
        end: Positions `[plan.prefix_len, end)` are made by the workers.
        front: Spans of text that sliding windows reach back to; workers read them too.
        front_donors: One per entry of `front`.
        first_approximate: Positions before it are exact, and stay so if the load fails.
        asynchronous: The request waits for it.
        num_rows: Positions that workers compute for it before vLLM goes on at `end`, as far as is known now.
        repair: When the policy's choice is computed; None if there is none.
        num_repair_rows: Positions that are computed with the second token, as far as is known now.
    """

    decision: Decision
    end: int
    front: tuple[Match, ...]
    front_donors: tuple[Donor, ...]
    first_approximate: int
    asynchronous: bool
    num_rows: int
    repair: RepairReport | None = None
    num_repair_rows: int = 0

    @property
    def plan(self) -> GraftPlan:
        """Spans and computed positions of the prompt."""
        return self.decision.plan

    @property
    def spans(self) -> tuple[Match, ...]:
        """Spans that workers read of donors."""
        return (*self.front, *self.plan.spans)

    @property
    def donors(self) -> tuple[Donor, ...]:
        """One per entry of `spans`."""
        return (*self.front_donors, *self.decision.donors)

    @property
    def repairs_after(self) -> bool:
        """Whether what the policy chooses is computed with the second token."""
        return self.repair is not None and self.repair.time is RepairTime.AFTER

    @property
    def num_tokens(self) -> int:
        """Tokens that are promised."""
        return self.end - self.plan.prefix_len

    @property
    def generation(self) -> int:
        """Highest generation of what it copies, and of what attends to that; 0 where all of that is exact."""
        return max(self.front_generation, *map(copied_generation, self.plan.spans))

    @property
    def front_generation(self) -> int:
        """Highest generation of windows that donors give before the prompt's prefix ends; 0 where none do."""
        return max([1, *map(copied_generation, self.front)]) if self.front else 0

    @property
    def num_stored_tokens(self) -> int:
        """Tokens of the plan that are read from stores."""
        return sum(span.length for span, _, tier in self.decision.spans() if tier != HOST)

    @property
    def source_starts(self) -> tuple[int, ...]:
        """Per entry of `spans` the position at which its first token was encoded."""
        return tuple(d.start_position + s.donor_start for s, d in zip(self.spans, self.donors, strict=True))

    def lying_in(self, tier_of: Callable[[DonorId], str]) -> Claim:
        """Return the claim with the tiers in which its donors lie now."""
        return replace(self, decision=replace(self.decision, tiers=_tiers(self.decision.donors, tier_of)))


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
        self.repair_times = RepairTimes(policy, facts, max_rows=self._max_rows)
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
        repair: RepairReport | None = None,
    ) -> Claim | Miss:
        """Promise everything up to the end of the last span; the engine computes the rest with its own prefill."""
        facts, end = self._facts, plan.spans[-1].target_end
        first = plan.prefix_len if facts.window else plan.spans[0].target_start
        reach = min(facts.window, plan.prefix_len + 1) - 1
        front = covering(matches, plan.prefix_len - reach, plan.prefix_len) if reach > 0 else ()
        if front is None:
            return Miss(MissReason.NO_MATCH, "no donor has the window before the end of the exact prefix")
        front_donors, donors = self._donors(front), self._donors(plan.spans)
        if len(front_donors) + len(donors) != len(front) + len(plan.spans):
            return Miss(MissReason.NO_DONORS, "a donor left during the lookup")
        num_rows = self.repair_times.num_rows(plan, token_ids, end, repair)
        asynchronous = {"sync": False, "async": True}.get(self._load, num_rows > self._max_rows)
        # A store is never waited for in a step that others share; of models with several KV groups, and on a GPU by default
        # (`runner.py`), vLLM takes back what a waiting request could not load, and nothing else.
        is_read = any(is_stored(donor) for donor in (*front_donors, *donors))
        asynchronous = asynchronous or is_read or len(facts.block_sizes) > 1 or not facts.takes_running_back
        policy = None if substitution is not None else self._policy
        tiers = _tiers(donors, self._tier_of)
        decision = Decision(plan, donors=donors, tiers=tiers, policy=policy, substitution=substitution)
        num_repair_rows = self.repair_times.num_rows_after(plan, token_ids, repair)
        return Claim(decision, end, front, front_donors, first, asynchronous, num_rows, repair, num_repair_rows)

    def _donors(self, spans: Iterable[Match]) -> tuple[Donor, ...]:
        """Return the donors of spans that are still there."""
        return tuple(donor for span in spans if (donor := self._catalogue.get(span.donor_id)) is not None)


def _tiers(donors: Iterable[Donor], tier_of: Callable[[DonorId], str]) -> tuple[str, ...]:
    return tuple(tier_of(donor.donor_id) for donor in donors)


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
