"""Run a session under each reuse mode and compare: tokens reused, time to first token, agreement with full prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvgraft.engine import LLM, SamplingParams
from kvgraft.fidelity import AgreementSummary, Divergence, divergence
from kvgraft.types import GraftReport, ReuseMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvgraft.engine.requests.request_builder import Prompt
    from kvgraft.types import TokenArray

CONTINUATION_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run the session; its answers are written out if they are to be shown, else only begun."""

    name: str
    reuse: ReuseMode
    selection: str
    answers: bool = False


@dataclass(frozen=True, slots=True)
class ModeResult:
    """Times and answers of a mode over the session.

    Attributes:
        name: Of the mode.
        prompt_tokens: Of all requests.
        reused_tokens: Prompt tokens that were not computed.
        recomputed_tokens: Matched tokens that the selection policy computed again.
        ttft_ms: Milliseconds to the first token, by request.
        agreement: With full prefill, over its answers of up to `CONTINUATION_TOKENS` tokens; None where reuse is exact.
        answers: Texts by request; empty where the mode does not write them out.
    """

    name: str
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    ttft_ms: tuple[float, ...]
    agreement: AgreementSummary | None
    answers: tuple[str, ...] = ()

    @property
    def reused_share(self) -> float:
        """Reused over all prompt tokens."""
        return self.reused_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True, eq=False)
class _Reference:
    """Full prefill's greedy answer to a prompt, its end token included, and its logits there."""

    continuation: TokenArray
    logits: Tensor


class SessionRunner:
    """Runs the same prompts under several modes, each from an empty cache; `full_prefill` comes first."""

    def __init__(self, llm: LLM, prompts: Sequence[Prompt], advance: Callable[[], object]) -> None:
        self._llm = llm
        self._prompts = [llm.tokenize(prompt) for prompt in prompts]
        self._advance = advance
        self._references: list[_Reference] = []
        self._sampling = SamplingParams(CONTINUATION_TOKENS)
        # The first call of torch's kernels is not a request's cost.
        llm.generate(self._prompts[0][:64], SamplingParams(2), "off")

    def full_prefill(self) -> ModeResult:
        """Run with reuse off and keep the references that other modes are compared with."""
        self._llm.reset()
        ttft, reports, answers = [], [], []
        for prompt in self._prompts:
            output = self._llm.generate(prompt, self._sampling, ReuseMode.OFF)[0]
            ttft.append(output.ttft_s * 1e3)
            reports.append(output.report)
            answers.append(output.text)
            continuation = np.asarray(output.token_ids, np.int64)
            # The request has just been published as an exact prefix, so this reads its own K/V and computes one token.
            score = self._llm.score(prompt, continuation, ReuseMode.EXACT)
            self._references.append(_Reference(continuation, score.logits))
            self._advance()
        return _result("off", reports, ttft, [], answers)

    def run(self, mode: Mode) -> ModeResult:
        """Run under `mode`; for grafts, compare with full prefill."""
        self._llm.reset()
        # An answer of one token would wait for its repair.
        sampling = self._sampling if mode.answers else SamplingParams(2)
        ttft, reports, divergences, answers = [], [], [], []
        for prompt, reference in zip(self._prompts, self._references, strict=True):
            if mode.reuse is ReuseMode.GRAFT:
                divergences.append(self._divergence(prompt, reference, mode))
            output = self._llm.generate(prompt, sampling, mode.reuse, selection=mode.selection)[0]
            ttft.append(output.ttft_s * 1e3)
            reports.append(output.report)
            if mode.answers:
                answers.append(output.text)
            self._advance()
        return _result(mode.name, reports, ttft, divergences, answers)

    def _divergence(self, prompt: TokenArray, reference: _Reference, mode: Mode) -> Divergence:
        score = self._llm.score(prompt, reference.continuation, mode.reuse, selection=mode.selection)
        return divergence(reference.logits, score.logits)


def _result(
    name: str,
    reports: Sequence[GraftReport],
    ttft_ms: Sequence[float],
    divergences: Sequence[Divergence],
    answers: Sequence[str],
) -> ModeResult:
    return ModeResult(
        name=name,
        prompt_tokens=sum(r.num_tokens for r in reports),
        reused_tokens=sum(r.reused_tokens for r in reports),
        recomputed_tokens=sum(r.recomputed_tokens for r in reports),
        ttft_ms=tuple(ttft_ms),
        agreement=AgreementSummary.of(divergences) if divergences else None,
        answers=tuple(answers),
    )
