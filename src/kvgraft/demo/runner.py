"""Answer every prompt without reuse, with exact prefixes and grafted, one right after the other.

Each mode has a `cache_salt` of its own, so that none reuses what another has read, and all three meet the same load of the
machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine import LLM, SamplingParams
from kvgraft.types import ReuseMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgraft.engine import RequestOutput
    from kvgraft.engine.requests.request_builder import Prompt

MODES = (ReuseMode.OFF, ReuseMode.EXACT, ReuseMode.GRAFT)
ANSWER_TOKENS = 24
"""Longest answer."""


@dataclass(frozen=True, slots=True, eq=False)
class JudgedAnswer:
    """A request's output under one mode, and whether what was asked for stands in it."""

    mode: ReuseMode
    output: RequestOutput
    is_right: bool


@dataclass(frozen=True, slots=True)
class ModeSummary:
    """A mode over the session.

    Attributes:
        mode: Which.
        prompt_tokens: Of all requests.
        reused_tokens: Prompt tokens that were not computed.
        recomputed_tokens: Matched tokens that the selection policy computed again.
        ttft_ms: Milliseconds to the first token, by request.
        total_ms: Milliseconds to the last token, by request.
        right: By request, whether the answer is right.
        answers: Texts by request.
    """

    mode: str
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    ttft_ms: tuple[float, ...]
    total_ms: tuple[float, ...]
    right: tuple[bool, ...]
    answers: tuple[str, ...]

    @classmethod
    def of(cls, answers: Sequence[JudgedAnswer]) -> ModeSummary:
        """Sum up answers of one mode."""
        outputs = [answer.output for answer in answers]
        return cls(
            mode=str(answers[0].mode),
            prompt_tokens=sum(output.report.num_tokens for output in outputs),
            reused_tokens=sum(output.report.reused_tokens for output in outputs),
            recomputed_tokens=sum(output.report.recomputed_tokens for output in outputs),
            ttft_ms=tuple(output.ttft_s * 1e3 for output in outputs),
            total_ms=tuple(output.total_s * 1e3 for output in outputs),
            right=tuple(answer.is_right for answer in answers),
            answers=tuple(output.text for output in outputs),
        )

    @property
    def reused_share(self) -> float:
        """Reused over all prompt tokens."""
        return self.reused_tokens / self.prompt_tokens

    @property
    def median_ttft_ms(self) -> float:
        """Median of milliseconds to the first token."""
        return float(np.median(self.ttft_ms))


def warm_up(llm: LLM, prompt: Prompt) -> None:
    """Generate a few tokens: the first call of torch's kernels is not a request's cost."""
    llm.generate(llm.tokenize(prompt)[:64], SamplingParams(2), ReuseMode.OFF, cache_salt="warm-up")


def answers(llm: LLM, prompt: Prompt, expected: str) -> Iterator[JudgedAnswer]:
    """Yield the greedy answer of each mode as it is done."""
    for mode in MODES:
        output = llm.generate(prompt, SamplingParams(ANSWER_TOKENS), mode, cache_salt=mode)[0]
        yield JudgedAnswer(mode, output, is_right(output.text, expected))


def is_right(text: str, expected: str) -> bool:
    """Return whether `expected` stands in an answer, upper or lower case and line breaks aside."""
    return expected.lower() in " ".join(text.split()).lower()
