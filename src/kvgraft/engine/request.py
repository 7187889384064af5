"""A request, what the engine knows of it while it runs, and what comes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.engine.sampling import SamplingParams, TokenLogprobs
    from kvgraft.graft.drift import DriftCorrection
    from kvgraft.graft.select import SelectionPolicy
    from kvgraft.types import GraftReport, Namespace, ReuseMode, TokenArray


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    """End-of-text token or stop text."""
    LENGTH = "length"
    """`max_new_tokens` or the model's longest sequence."""
    ABORT = "abort"
    """Cancelled by its owner."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What somebody asked for.

    Attributes:
        request_id: Name in reports and logs; unique among unfinished requests.
        token_ids: int64 prompt.
        sampling: How to generate.
        reuse: What may be reused for it.
        namespace: Whose K/V it may read and whose its own will be.
        policy: Chooses reused tokens to compute again.
        arrival: `time.perf_counter()` when it arrived.
        correction: What is done about the drift of the others; None for nothing.
    """

    request_id: str
    token_ids: TokenArray
    sampling: SamplingParams
    reuse: ReuseMode
    namespace: Namespace
    policy: SelectionPolicy
    arrival: float = field(default_factory=time.perf_counter)
    correction: DriftCorrection | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RequestOutput:
    """The result of a request.

    Attributes:
        request_id: Name given at submission.
        prompt_token_ids: int64 prompt.
        token_ids: Generated ids, an end-of-text token included.
        text: Decoded output without special tokens and stop text; empty if the model has no tokenizer.
        finish_reason: Why it ended.
        report: What was reused and at what cost.
        ttft_s: Seconds from arrival to the first token.
        total_s: Seconds from arrival to the end.
        queue_s: Seconds from arrival to its first admission; part of `ttft_s`.
        num_preemptions: How often it lost its slots and was computed again.
    """

    request_id: str
    prompt_token_ids: TokenArray
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    report: GraftReport
    ttft_s: float
    total_s: float
    queue_s: float = 0.0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One token of a streamed request.

    Attributes:
        text: Text that became certain.
        token_id: Token drawn in this step.
        output: The whole result; set in the last part only.
        logprobs: Log-probabilities at this token, if the request asked for them.
    """

    text: str
    token_id: int
    output: RequestOutput | None = None
    logprobs: TokenLogprobs | None = None
