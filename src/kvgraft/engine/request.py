"""A request and what the engine knows of it while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.engine.sampling import SamplingParams
    from kvgraft.prefix import PrefixHandle
    from kvgraft.types import GraftPlan, GraftReport, Miss, Namespace, ReuseMode, TokenArray


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
        request_id: Name in reports and logs.
        token_ids: int64 prompt.
        sampling: How to generate.
        reuse: What may be reused for it.
        namespace: Whose K/V it may read and whose its own will be.
    """

    request_id: str
    token_ids: TokenArray
    sampling: SamplingParams
    reuse: ReuseMode
    namespace: Namespace


@dataclass(slots=True, eq=False)
class RequestCache:
    """The K/V side of a running request: its slots, its plan, and what it pins.

    Attributes:
        request: The request.
        plan: Which prompt positions are reused and computed; without a graft everything behind the exact prefix is computed.
        miss: Why nothing is grafted, or None.
        kv_indices: int64, slot of each position whose K/V exist or are about to; all of them held by the request.
        handle: Lock on the exact prefix.
        donors: Donors of the plan's spans, by span.
        pinned: Those of them that cannot be evicted at present.
    """

    request: Request
    plan: GraftPlan
    miss: Miss | None
    kv_indices: NDArray[np.int64]
    handle: PrefixHandle | None
    donors: tuple[Donor, ...]
    timings_ms: dict[str, float] = field(default_factory=dict)
    pinned: tuple[Donor, ...] = ()

    @property
    def exact_end(self) -> int:
        """First position whose K/V is not what a full prefill would give; the end of the sequence if all is exact."""
        return self.plan.spans[0].target_start if self.plan.spans else len(self.kv_indices)


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
        ttft_s: Seconds from admission to the first token.
        total_s: Seconds from admission to the end.
    """

    request_id: str
    prompt_token_ids: TokenArray
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    report: GraftReport
    ttft_s: float
    total_s: float
