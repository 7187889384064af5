"""Measure time to first token of a document that was read before at another position."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine import LLM, RequestOutput, SamplingParams
from kvgraft.errors import ConfigError
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.types import TokenArray

ONE_TOKEN = SamplingParams(1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class TtftResult:
    """Medians over rounds for one prompt length. Seconds run from admission to the first token.

    Attributes:
        length: Prompt tokens: `shift` new ones, then the document.
        cold_s: Reuse off.
        prefix_s: Exact prefixes only, the document having been read at position 0.
        repeat_s: Exact prefixes only, the very same prompt having been read.
        graft_s: Grafted under the configured selection policy.
        computed_tokens: Positions that the graft computed.
        lookup_ms: Match and plan of the graft.
        copy_ms: Copy and rotation of the graft.
        flop_bound: Operations of full prefill over those of the computed positions.
        speedup: `cold_s / graft_s`.
        achieved_over_bound: `speedup / flop_bound`.
        miss_overhead: Median over rounds of TTFT with donors that do not match over cold TTFT of the same round, minus 1.
        miss_lookup_share: Time to find out that nothing matches, over `cold_s`.
    """

    length: int
    cold_s: float
    prefix_s: float
    repeat_s: float
    graft_s: float
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
    """

    selection: str | None = None
    correction: str | None = None


CONFIGURED = GraftAs()


@dataclass(frozen=True, slots=True, eq=False)
class TtftRound:
    """One prompt of each kind, all of one length, one after another.

    Attributes:
        cold: Reuse off.
        prefix: Exact prefixes only, the document having been read at position 0.
        repeat: Exact prefixes only, the very same prompt having been read.
        grafts: Grafted, in each way that was asked for.
        miss: With donors that have nothing of the prompt, which is the one of `cold`.
    """

    cold: RequestOutput
    prefix: RequestOutput
    repeat: RequestOutput
    grafts: tuple[RequestOutput, ...]
    miss: RequestOutput

    @property
    def graft(self) -> RequestOutput:
        """The first graft."""
        return self.grafts[0]


def measure_ttft(
    llm: LLM, length: int, shift: int, *, repeat: int, seed: int, advance: Callable[[], object]
) -> TtftResult:
    """Run `repeat` rounds of every mode, interleaved, over random tokens.

    Raises:
        ConfigError: `length` does not fit, or nothing was grafted, so that there is nothing to measure.
    """
    draws = Draws(llm, (seed, length))
    llm.validate(draws.tokens(length), ONE_TOKEN)
    llm.generate(draws.tokens(min(256, length)), ONE_TOKEN, ReuseMode.OFF)
    rounds = []
    for _ in range(repeat):
        rounds.append(measure_round(llm, draws, length, shift))
        advance()
    return _summarise(length, rounds)


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


def measure_round(
    llm: LLM, draws: Draws, length: int, shift: int, ways: Sequence[GraftAs] = (CONFIGURED,)
) -> TtftRound:
    """Run every mode once over new random tokens: prompts of `shift` new ones and a document that was read at position 0.

    Every prompt has new tokens of its own in front, so that no mode finds what another one left.

    Raises:
        ConfigError: Nothing was grafted, so that there is nothing to measure.
    """
    document, other = draws.tokens(length - shift), draws.tokens(length)
    llm.reset()
    _first_token(llm, document, ReuseMode.OFF)
    miss = _first_token(llm, other, ReuseMode.GRAFT)
    grafts = tuple(_graft(llm, draws.tokens(shift), document, way) for way in ways)
    prompt = np.concatenate([draws.tokens(shift), document])
    prefix = _first_token(llm, prompt, ReuseMode.EXACT)
    again = _first_token(llm, prompt, ReuseMode.EXACT)
    llm.reset()
    cold = _first_token(llm, other, ReuseMode.OFF)
    return TtftRound(cold, prefix, again, grafts, miss)


def _graft(llm: LLM, beginning: TokenArray, document: TokenArray, way: GraftAs) -> RequestOutput:
    prompt = np.concatenate([beginning, document])
    graft = llm.generate(prompt, ONE_TOKEN, ReuseMode.GRAFT, selection=way.selection, correction=way.correction)[0]
    if not graft.report.shifted_tokens:
        missed = graft.report.miss
        why = llm.graft_refusal or (f"{missed.reason.value} {missed.detail}" if missed else "all was recomputed")
        raise ConfigError(
            f"nothing was grafted of a document of {len(document)} tokens ({why}); choose another --model or selection"
        )
    return graft


def _first_token(llm: LLM, prompt: TokenArray, reuse: ReuseMode) -> RequestOutput:
    return llm.generate(prompt, ONE_TOKEN, reuse)[0]


def _summarise(length: int, rounds: list[TtftRound]) -> TtftResult:
    def median(read: Callable[[TtftRound], float]) -> float:
        return statistics.median(map(read, rounds))

    cold_s, graft_s = median(lambda r: r.cold.ttft_s), median(lambda r: r.graft.ttft_s)
    bound = median(lambda r: r.graft.report.full_flops / r.graft.report.computed_flops)
    return TtftResult(
        length=length,
        cold_s=cold_s,
        prefix_s=median(lambda r: r.prefix.ttft_s),
        repeat_s=median(lambda r: r.repeat.ttft_s),
        graft_s=graft_s,
        computed_tokens=int(median(lambda r: r.graft.report.computed_tokens)),
        lookup_ms=median(lambda r: r.graft.report.timings_ms["lookup"]),
        copy_ms=median(lambda r: r.graft.report.timings_ms["graft"]),
        flop_bound=bound,
        speedup=cold_s / graft_s,
        achieved_over_bound=cold_s / graft_s / bound,
        miss_overhead=median(lambda r: r.miss.ttft_s / r.cold.ttft_s) - 1,
        miss_lookup_share=median(lambda r: r.miss.report.timings_ms["lookup"]) / 1e3 / cold_s,
    )
