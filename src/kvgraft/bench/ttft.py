"""Measure answers about a document that was read before at another position: first token, gap to the second, all tokens."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.bench.timed_answer import TimedAnswer, timed_answer
from kvgraft.engine import LLM, SamplingParams
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.types import TokenArray

ONE_TOKEN = SamplingParams(1, ignore_eos=True)
SHORT_ANSWER = SamplingParams(8, ignore_eos=True)
"""An answer of one token is repaired before it, so that others are measured with several."""


@dataclass(frozen=True, slots=True)
class TtftResult:
    """Medians over rounds for one prompt length. Seconds run from the call to the first token unless it is said otherwise.

    Attributes:
        tokens: Of every answer.
        length: Prompt tokens: `shift` new ones, then the document.
        cold_s: Reuse off.
        prefix_s: Exact prefixes only, the document having been read at position 0.
        repeat_s: Exact prefixes only, the very same prompt having been read.
        hit_s: Exact prefixes only, the document having been read where it stands, before as many new tokens as in the graft.
        graft_s: Grafted under the configured selection policy.
        graft_second_gap_s: From the first token of the graft to the second, which waits for a repair after the first.
        graft_later_gap_s: Median between its later tokens.
        cold_total_s: Reuse off, to the last token.
        hit_total_s: As `hit_s`, to the last token.
        graft_total_s: Grafted, to the last token.
        computed_tokens: Positions that the graft computed.
        lookup_ms: Match and plan of the graft.
        copy_ms: Copy and rotation of the graft.
        flop_bound: Operations of full prefill over those of the computed positions, those of a repair after the first token
            included, for which `graft_s` does not wait.
        speedup: `cold_s / graft_s`.
        achieved_over_bound: `speedup / flop_bound`.
        miss_overhead: Median over rounds of TTFT with donors that do not match over cold TTFT of the same round, minus 1.
        miss_lookup_share: Time to find out that nothing matches, over `cold_s`.
    """

    tokens: int
    length: int
    cold_s: float
    prefix_s: float
    repeat_s: float
    hit_s: float
    graft_s: float
    graft_second_gap_s: float
    graft_later_gap_s: float
    cold_total_s: float
    hit_total_s: float
    graft_total_s: float
    computed_tokens: int
    lookup_ms: float
    copy_ms: float
    flop_bound: float
    speedup: float
    achieved_over_bound: float
    miss_overhead: float
    miss_lookup_share: float


@dataclass(frozen=True, slots=True)
class GraftAs:
    """How a prompt is grafted.

    Attributes:
        selection: Name of the policy; None for the configured one.
        correction: Name of the drift correction; None for the configured one.
        repair: Time of the policy's choice, before or after the first token; None for the configured one.
    """

    selection: str | None = None
    correction: str | None = None
    repair: str | None = None


CONFIGURED = GraftAs()


@dataclass(frozen=True, slots=True, eq=False)
class TtftRound:
    """One prompt of each kind, all of one length, one after another.

    Attributes:
        cold: Reuse off.
        prefix: Exact prefixes only, the document having been read at position 0.
        repeat: Exact prefixes only, the very same prompt having been read.
        hit: Exact prefixes only, `shift` new tokens having come after the document, which was read at position 0.
        grafts: Grafted, in each way that was asked for.
        miss: With donors that have nothing of the prompt, which is the one of `cold`.
    """

    cold: TimedAnswer
    prefix: TimedAnswer
    repeat: TimedAnswer
    hit: TimedAnswer
    grafts: tuple[TimedAnswer, ...]
    miss: TimedAnswer

    @property
    def graft(self) -> TimedAnswer:
        """The first graft."""
        return self.grafts[0]


@dataclass(frozen=True, slots=True)
class RoundShape:
    """Prompts and answers of a round.

    Attributes:
        length: Prompt tokens.
        shift: New ones among them, before the document.
        sampling: Of the answers.
    """

    length: int
    shift: int
    sampling: SamplingParams = SHORT_ANSWER


def measure_ttft(llm: LLM, shape: RoundShape, *, repeat: int, seed: int, advance: Callable[[], object]) -> TtftResult:
    """Run `repeat` rounds of every mode, interleaved, over random tokens.

    Raises:
        ConfigError: The prompt does not fit, or nothing was grafted, so that there is nothing to measure.
    """
    draws = Draws(llm, (seed, shape.length))
    llm.validate(draws.tokens(shape.length), shape.sampling)
    llm.generate(draws.tokens(min(256, shape.length)), shape.sampling, ReuseMode.OFF)
    rounds = []
    for _ in range(repeat):
        rounds.append(measure_round(llm, draws, shape))
        advance()
    return _summarise(shape, rounds)


class Draws:
    """Random tokens of a model, none of them special in the usual vocabularies.

    Args:
        llm: The model.
        seed: The same tokens for the same numbers.
    """

    def __init__(self, llm: LLM, seed: Sequence[int]) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = llm.loaded.vocab_size

    def tokens(self, count: int) -> TokenArray:
        """Draw int64 (count,)."""
        return self._rng.integers(3, self._vocab_size, count, dtype=np.int64)


def measure_round(llm: LLM, draws: Draws, shape: RoundShape, ways: Sequence[GraftAs] = (CONFIGURED,)) -> TtftRound:
    """Run every mode once over new random tokens: prompts of `shift` new ones and a document that was read at position 0.

    Every prompt has new tokens of its own in front, so that no mode finds what another one left.

    Raises:
        ConfigError: Nothing was grafted, so that there is nothing to measure.
    """
    document, other = draws.tokens(shape.length - shape.shift), draws.tokens(shape.length)
    llm.reset()
    llm.generate(document, ONE_TOKEN, ReuseMode.OFF)
    miss = timed_answer(llm, other, shape.sampling, ReuseMode.GRAFT)
    grafts = tuple(_graft(llm, draws, document, shape, way) for way in ways)
    hit = timed_answer(llm, np.concatenate([document, draws.tokens(shape.shift)]), shape.sampling, ReuseMode.EXACT)
    prompt = np.concatenate([draws.tokens(shape.shift), document])
    prefix = timed_answer(llm, prompt, shape.sampling, ReuseMode.EXACT)
    again = timed_answer(llm, prompt, shape.sampling, ReuseMode.EXACT)
    llm.reset()
    cold = timed_answer(llm, other, shape.sampling, ReuseMode.OFF)
    return TtftRound(cold, prefix, again, hit, grafts, miss)


def _graft(llm: LLM, draws: Draws, document: TokenArray, shape: RoundShape, way: GraftAs) -> TimedAnswer:
    prompt = np.concatenate([draws.tokens(shape.shift), document])
    graft = timed_answer(
        llm,
        prompt,
        shape.sampling,
        ReuseMode.GRAFT,
        selection=way.selection,
        correction=way.correction,
        repair=way.repair,
    )
    if not graft.report.shifted_tokens:
        missed = graft.report.miss
        why = llm.graft_refusal or (f"{missed.reason.value} {missed.detail}" if missed else "all was recomputed")
        raise ConfigError(
            f"nothing was grafted of a document of {len(document)} tokens ({why}); choose another --model or selection"
        )
    return graft


def _summarise(shape: RoundShape, rounds: list[TtftRound]) -> TtftResult:
    def median(read: Callable[[TtftRound], float]) -> float:
        return statistics.median(map(read, rounds))

    cold_s, graft_s = median(lambda r: r.cold.ttft_s), median(lambda r: r.graft.ttft_s)
    bound = median(lambda r: r.graft.report.full_flops / r.graft.report.computed_flops)
    return TtftResult(
        tokens=shape.sampling.max_new_tokens,
        length=shape.length,
        cold_s=cold_s,
        prefix_s=median(lambda r: r.prefix.ttft_s),
        repeat_s=median(lambda r: r.repeat.ttft_s),
        hit_s=median(lambda r: r.hit.ttft_s),
        graft_s=graft_s,
        graft_second_gap_s=median(lambda r: r.graft.second_gap_s),
        graft_later_gap_s=median(lambda r: r.graft.later_gap_s),
        cold_total_s=median(lambda r: r.cold.total_s),
        hit_total_s=median(lambda r: r.hit.total_s),
        graft_total_s=median(lambda r: r.graft.total_s),
        computed_tokens=int(median(lambda r: r.graft.report.computed_tokens)),
        lookup_ms=median(lambda r: r.graft.report.timings_ms["lookup"]),
        copy_ms=median(lambda r: r.graft.report.timings_ms["graft"]),
        flop_bound=bound,
        speedup=cold_s / graft_s,
        achieved_over_bound=cold_s / graft_s / bound,
        miss_overhead=median(lambda r: r.miss.ttft_s / r.cold.ttft_s) - 1,
        miss_lookup_share=median(lambda r: r.miss.report.timings_ms["lookup"]) / 1e3 / cold_s,
    )
