"""Replay a workload against the donor catalogue, planning only: how much is found, how fast, and is it right."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.bound import PrefixSet, covered_positions
from kvgraft.donors import GRAM_TOKENS, CostModel, DonorCatalogue, DonorQuery, plan_graft
from kvgraft.types import GraftPlan, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvgraft.bench.packs import PackSession, Workload
    from kvgraft.bench.tokenization import Tokenize
    from kvgraft.types import Match

    Tokens = NDArray[np.int32]

_NAMESPACE = Namespace("bench")
_SECRET = bytes(32)
"""Known, so that every run finds the same."""
_ALWAYS_WORTH_IT = CostModel(copy_per_token=0.0, per_span=0.0)
"""Free copies, so that figures count all that is found; what pays depends on the model."""


@dataclass(frozen=True, slots=True)
class PromptReuse:
    """Tokens of one prompt.

    Attributes:
        prefix_tokens: In the longest prefix of an earlier prompt.
        reused_tokens: `prefix_tokens` and the spans of the plan.
        bound_tokens: In a run that occurs at any offset of an earlier prompt.
    """

    tokens: int
    prefix_tokens: int
    reused_tokens: int
    bound_tokens: int


@dataclass(frozen=True, slots=True)
class ReuseResult:
    """Tokens of a workload that could be reused and that were planned.

    The last token of a prompt is always computed and counts nowhere but in `tokens`. Nor does a prefix shorter than the
    shortest run, so `reused_tokens` is never more than `bound_tokens`.

    Attributes:
        workload: Name of the pack.
        requests: Prompts that were looked up.
        tokens: Their tokens.
        prefix_tokens: Of these, in the longest prefix that an earlier prompt begins with too, to the token.
        reused_tokens: `prefix_tokens` and the spans of the plans.
        bound_tokens: In a run of at least `min_run` that occurs at any offset of an earlier prompt, found exactly.
        half_reused: Prompts of which at least half the tokens are reused.
        wrong_tokens: Reused tokens that differ from the donor's at the planned position. Must be 0.
        lookup_ms: Matching and planning, per request: `p50`, `p99`, `max`.
        register_ms: Registering a prompt as a donor: `p50`, `p99`.
        prompts: Each prompt that was looked up, in order of arrival.
    """

    workload: str
    requests: int
    tokens: int
    prefix_tokens: int
    reused_tokens: int
    bound_tokens: int
    half_reused: int
    wrong_tokens: int
    lookup_ms: dict[str, float]
    register_ms: dict[str, float]
    prompts: tuple[PromptReuse, ...] = ()

    @property
    def recovered(self) -> float:
        """Share of the bound that was planned; 1 where there is nothing to recover."""
        return self.reused_tokens / self.bound_tokens if self.bound_tokens else 1.0

    def as_dict(self) -> dict[str, object]:
        """Return what is printed as JSON."""
        return {
            "workload": self.workload,
            "requests": self.requests,
            "tokens": self.tokens,
            "prefix_tokens": self.prefix_tokens,
            "reused_tokens": self.reused_tokens,
            "bound_tokens": self.bound_tokens,
            "recovered": round(self.recovered, 4),
            "half_reused": self.half_reused,
            "wrong_tokens": self.wrong_tokens,
            "lookup_ms": self.lookup_ms,
            "register_ms": self.register_ms,
        }


@dataclass(slots=True)
class _Tally:
    """Counts of a workload, prompt by prompt."""

    prompts: list[PromptReuse] = field(default_factory=list)
    wrong: int = 0
    lookup_s: list[float] = field(default_factory=list)
    register_s: list[float] = field(default_factory=list)


def measure_reuse(
    workload: Workload,
    tokenize: Tokenize,
    *,
    min_run: int,
    capacity: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> ReuseResult:
    """Look every prompt up, plan, and then register it as a donor.

    Args:
        workload: Prompts in order of arrival.
        tokenize: Gives their tokens.
        min_run: Shortest run that counts.
        capacity: Tokens that donors may have together; None for all.
        advance: Called once per prompt.

    Raises:
        ConfigError: `min_run` or `capacity` is too small.
    """
    tally = _Tally()
    for session in workload.sessions:
        prompts = [tokenize(text) for text in (*session.cached, *session.requests)]
        covered = covered_positions(prompts, min_run)
        bounds = [int(np.count_nonzero(is_covered[:-1])) for is_covered in covered]
        _Replay(prompts, min_run, capacity, tally).run(session, bounds, advance)
    found = tally.prompts
    return ReuseResult(
        workload=workload.name,
        requests=len(found),
        tokens=sum(prompt.tokens for prompt in found),
        prefix_tokens=sum(prompt.prefix_tokens for prompt in found),
        reused_tokens=sum(prompt.reused_tokens for prompt in found),
        bound_tokens=sum(prompt.bound_tokens for prompt in found),
        half_reused=sum(2 * prompt.reused_tokens >= prompt.tokens > 0 for prompt in found),
        wrong_tokens=tally.wrong,
        lookup_ms=_percentiles(tally.lookup_s, p50=50, p99=99, max=100),
        register_ms=_percentiles(tally.register_s, p50=50, p99=99),
        prompts=tuple(found),
    )


class _Replay:
    """One session: a catalogue, the prefixes seen, and which donor is which prompt."""

    def __init__(self, prompts: Sequence[Tokens], min_run: int, capacity: int | None, tally: _Tally) -> None:
        everything = max(GRAM_TOKENS, sum(map(len, prompts)))
        room = everything if capacity is None else capacity
        self._catalogue = DonorCatalogue(room, min_run=min_run, secret=_SECRET)
        self._prefixes = PrefixSet()
        self._prompt_of_donor: dict[int, Tokens] = {}
        self._prompts = prompts
        self._min_run = min_run
        self._tally = tally

    def run(self, session: PackSession, bounds: Sequence[int], advance: Callable[[], object]) -> None:
        for index, (tokens, bound) in enumerate(zip(self._prompts, bounds, strict=True)):
            if index >= len(session.cached):
                self._look_up(tokens, bound)
            self._register(tokens)
            advance()

    def _look_up(self, tokens: Tokens, bound: int) -> None:
        tally = self._tally
        prefix_len = self._prefixes.longest_prefix(tokens[:-1])
        if prefix_len < self._min_run:
            prefix_len = 0
        started = time.perf_counter()
        matches = self._catalogue.find(DonorQuery(_NAMESPACE, tokens, start=prefix_len))
        plan = plan_graft(len(tokens), prefix_len, matches, _ALWAYS_WORTH_IT, min_run=self._min_run)
        tally.lookup_s.append(time.perf_counter() - started)
        reused = prefix_len
        if isinstance(plan, GraftPlan):
            reused += plan.reused_len
            tally.wrong += sum(self._num_wrong(tokens, span) for span in plan.spans)
        tally.prompts.append(PromptReuse(len(tokens), prefix_len, reused, bound))

    def _num_wrong(self, tokens: Tokens, span: Match) -> int:
        """Compare with the prompt that was registered, not with what the catalogue kept of it."""
        donor = self._prompt_of_donor[span.donor_id][span.donor_start : span.donor_start + span.length]
        target = tokens[span.target_start : span.target_end]
        return int(np.count_nonzero(donor != target)) if len(donor) == len(target) else span.length

    def _register(self, tokens: Tokens) -> None:
        self._prefixes.add(tokens)
        if len(tokens) > self._catalogue.capacity_tokens:
            return
        started = time.perf_counter()
        donor = self._catalogue.add(_NAMESPACE, tokens, None).donor
        self._tally.register_s.append(time.perf_counter() - started)
        if donor is not None:
            self._prompt_of_donor[donor.donor_id] = tokens


def _percentiles(seconds: Sequence[float], **percents: float) -> dict[str, float]:
    """Return percentiles in milliseconds by name."""
    values = np.array(seconds or [0.0]) * 1e3
    return {name: round(float(np.percentile(values, percent)), 4) for name, percent in percents.items()}
