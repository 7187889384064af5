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
    from collections.abc import Callable

    from kvgraft.types import TokenArray

_ONE_TOKEN = SamplingParams(1, ignore_eos=True)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Round:
    cold: RequestOutput
    prefix: RequestOutput
    repeat: RequestOutput
    graft: RequestOutput
    miss: RequestOutput


def measure_ttft(
    llm: LLM, length: int, shift: int, *, repeat: int, seed: int, advance: Callable[[], object]
) -> TtftResult:
    """Run `repeat` rounds of every mode, interleaved, over random tokens.

    Raises:
        ConfigError: `length` does not fit, or nothing was grafted, so that there is nothing to measure.
    """
    rng = np.random.default_rng((seed, length))

    def draw(count: int) -> TokenArray:
        return rng.integers(3, llm.loaded.vocab_size, count, dtype=np.int64)

    llm.validate(draw(length), _ONE_TOKEN)
    llm.generate(draw(min(256, length)), _ONE_TOKEN, ReuseMode.OFF)
    rounds = []
    for _ in range(repeat):
        rounds.append(_run_round(llm, draw(length - shift), draw(shift), draw(length)))
        advance()
    return _summarise(length, rounds)


def _run_round(llm: LLM, document: TokenArray, beginning: TokenArray, other: TokenArray) -> _Round:
    prompt = np.concatenate([beginning, document])
    llm.reset()
    _first_token(llm, document, ReuseMode.OFF)
    miss = _first_token(llm, other, ReuseMode.GRAFT)
    llm.reset()
    cold = _first_token(llm, other, ReuseMode.OFF)
    llm.reset()
    _first_token(llm, document, ReuseMode.OFF)
    prefix = _first_token(llm, prompt, ReuseMode.EXACT)
    again = _first_token(llm, prompt, ReuseMode.EXACT)
    llm.reset()
    _first_token(llm, document, ReuseMode.OFF)
    graft = _first_token(llm, prompt, ReuseMode.GRAFT)
    if not graft.report.shifted_tokens:
        missed = graft.report.miss
        why = llm.graft_refusal or (f"{missed.reason.value} {missed.detail}" if missed else "all was recomputed")
        raise ConfigError(
            f"nothing was grafted of a document of {len(document)} tokens ({why}); choose another --model or selection"
        )
    llm.reset()
    return _Round(cold, prefix, again, graft, miss)


def _first_token(llm: LLM, prompt: TokenArray, reuse: ReuseMode) -> RequestOutput:
    return llm.generate(prompt, _ONE_TOKEN, reuse)[0]


def _summarise(length: int, rounds: list[_Round]) -> TtftResult:
    def median(read: Callable[[_Round], float]) -> float:
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
