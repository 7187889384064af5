"""Decide which matches are worth copying. Pure: no donors, no K/V, no clock."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvgraft.donors.fingerprint import GRAM_TOKENS
from kvgraft.errors import ConfigError
from kvgraft.types import GraftPlan, Match, Miss, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    ReadCost = Callable[[Match], float]
    """The cost of getting the K/V of a match to where they can be copied, in the unit of the cost model: 0 of those that are
    there, infinite of those that cannot be had."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Relative costs; the unit is one token's pass through the layers without attention. A heuristic.

    The defaults are orders of magnitude for a dense model of some billion parameters. Copying wins for nearly every
    span that is long enough to be matched, so a factor of two in any of them changes few plans.
    """

    compute_per_token: float = 1.0
    attention_per_key: float = 3e-5
    """What attention adds per token and position that it attends to. `2 * layers * width / parameters` of FLOPs: 3e-5 for 8 B
    parameters, 3e-4 for 20 M."""
    copy_per_token: float = 0.01
    per_span: float = 4.0
    per_phase: float = 0.0
    """Fixed cost of every group of adjacent spans that does not touch the exact prefix. An engine that computes the gap
    before each group in a step of its own pays it; 0 where one forward pass computes all gaps."""
    recompute_ratio: float = 0.05
    """Share of reused tokens that the selection policy computes again."""
    query_rows: int = 0
    """How many of the last computed rows a forward pass runs a second time, after the reused tokens that are chosen by what
    these rows attend to."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 0:
                raise ConfigError(f"{field.name} must not be negative, not {value}")
        if self.recompute_ratio > 1:
            raise ConfigError(f"recompute_ratio must be at most 1, not {self.recompute_ratio}")

    @classmethod
    def of_width(
        cls, hidden_size: int, *, per_phase: float = 0.0, recompute_ratio: float, query_rows: int = 0
    ) -> CostModel:
        """Costs of a decoder of which only the width is known.

        It has about 12 parameters per layer and squared width, and attention does 2 multiplications per layer, width and
        key: one sixth of the width's inverse per key.
        """
        return cls(
            attention_per_key=1 / (6 * hidden_size),
            per_phase=per_phase,
            recompute_ratio=recompute_ratio,
            query_rows=query_rows,
        )

    def compute_cost(self, start: int, end: int) -> float:
        """Cost of computing the tokens of positions `[start, end)`."""
        length = end - start
        return length * (self.compute_per_token + self.attention_per_key * (start + end + 1) / 2)

    def saving(self, start: int, end: int, *, is_shifted: bool = True) -> float:
        """Return what reusing positions `[start, end)` as one span saves; negative where computing is cheaper."""
        saved = (1 - self.recompute_ratio if is_shifted else 1.0) * self.compute_cost(start, end)
        return saved - self.copy_per_token * (end - start) - self.per_span

    def look_cost(self, plan: GraftPlan) -> float:
        """Return the cost of choosing among the reused tokens of a plan by what attends to them."""
        if not plan.has_shifted:
            return 0.0
        query_start = plan.num_tokens - min(self.query_rows, len(plan.compute))
        return self.compute_cost(query_start, plan.num_tokens)


def plan_graft(
    num_tokens: int,
    prefix_len: int,
    matches: Sequence[Match],
    cost_model: CostModel | None = None,
    *,
    min_run: int = GRAM_TOKENS,
    read_cost: ReadCost | None = None,
) -> GraftPlan | Miss:
    """Choose the matches to reuse and the positions to compute.

    The exact prefix is cut off the matches, and so is the last token, which is always computed: its logits are what the
    prompt is for.

    Args:
        num_tokens: Length of the prompt.
        prefix_len: Tokens that have their K/V already.
        matches: Sorted and disjoint, as `DonorCatalogue.find` returns them.
        cost_model: Which matches pay; None for the defaults.
        min_run: Shortest match, its last token included, that is reused after the exact prefix.
        read_cost: What reading costs besides, of what may be left of each match; None where all K/V are at hand.

    Raises:
        ConfigError: The arguments contradict one another.

    Complexity: O(n + matches).
    """
    _validate(num_tokens, prefix_len, matches)
    if prefix_len >= num_tokens - 1:
        return Miss(MissReason.COVERED_BY_PREFIX, "the exact prefix leaves nothing to reuse")
    if not matches:
        return Miss(MissReason.NO_MATCH, "no donor shares a run of tokens")
    after = [match for match in matches if match.target_end > prefix_len]
    if not after:
        return Miss(MissReason.COVERED_BY_PREFIX, "all matches lie in the exact prefix")
    costs = CostModel() if cost_model is None else cost_model
    parts = _parts(after, prefix_len, num_tokens - 1, min_run)
    savings = list(_worthwhile(parts, costs, read_cost or _resident))
    savings = list(_worth_a_phase(savings, prefix_len, costs))
    spans = tuple(span for span, _ in savings)
    if not spans:
        return Miss(MissReason.NOT_WORTH_IT, f"none of {len(after)} matches saves more than it costs")
    # All spans or none: without the last one, the tail would only be longer.
    plan = GraftPlan.over(num_tokens, prefix_len, spans)
    saved = sum(saving for _, saving in savings)
    if saved <= costs.look_cost(plan):
        return Miss(MissReason.NOT_WORTH_IT, "looking at the tokens after the matches costs more than they save")
    return plan


def _validate(num_tokens: int, prefix_len: int, matches: Sequence[Match]) -> None:
    if not 0 <= prefix_len <= num_tokens:
        raise ConfigError(f"an exact prefix of {prefix_len} tokens does not fit a prompt of {num_tokens}")
    end = 0
    for match in matches:
        if match.target_start < end or match.length <= 0:
            raise ConfigError("matches must be sorted, disjoint and not empty")
        end = match.target_end
    if end > num_tokens:
        raise ConfigError(f"a match ends at {end}, after the end of a prompt of {num_tokens} tokens")


def _resident(_: Match) -> float:
    return 0.0


def _parts(matches: Iterable[Match], start: int, end: int, min_run: int) -> Iterable[Match]:
    """Yield what is left of `matches` in `[start, end)`, where that is long enough."""
    for match in matches:
        begin, stop = max(match.target_start, start), min(match.target_end, end)
        if match.target_end - begin >= min_run and stop > begin:
            yield match.part(begin, stop)


def _worthwhile(parts: Iterable[Match], costs: CostModel, read_cost: ReadCost) -> Iterable[tuple[Match, float]]:
    """Yield those that pay, and what each saves."""
    for part in parts:
        saving = costs.saving(part.target_start, part.target_end, is_shifted=part.is_shifted)
        if saving > 0 and (saving := saving - read_cost(part)) > 0:
            yield part, saving


def _worth_a_phase(
    spans: Sequence[tuple[Match, float]], prefix_len: int, costs: CostModel
) -> Iterable[tuple[Match, float]]:
    """Yield the spans of groups that save more than a phase costs.

    Dropping a group makes one gap of the two beside it and changes no other group's saving, so each is judged alone.
    """
    for group in _adjacent(spans):
        if group[0][0].target_start == prefix_len or sum(saving for _, saving in group) > costs.per_phase:
            yield from group


def _adjacent(spans: Sequence[tuple[Match, float]]) -> list[list[tuple[Match, float]]]:
    """Group spans that follow one another without a gap."""
    groups: list[list[tuple[Match, float]]] = []
    for entry in spans:
        if groups and groups[-1][-1][0].target_end == entry[0].target_start:
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return groups
