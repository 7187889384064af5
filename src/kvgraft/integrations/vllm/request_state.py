"""What the scheduler's half remembers of a request that vLLM has not finished."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.types import Fidelity as ReusedAs
from kvgraft.types import GraftPlan, GraftReport, Match, Miss, SpanReport

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.integrations.vllm.messages import BlockIds, GraftOutcome, PieceId
    from kvgraft.integrations.vllm.private_hashes import PrivateBlockHashes
    from kvgraft.types import Namespace


@dataclass(slots=True, eq=False)
class Piece:
    """Text that is being captured and shall become a donor.

    Attributes:
        piece_id: Its name.
        start: Position of its first token.
        stop: First position behind it.
        generation: Of the donor.
        next: First position that is not captured yet.
    """

    piece_id: PieceId
    start: int
    stop: int
    generation: int
    next: int


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """What was promised to vLLM for a request.

    Attributes:
        plan: Spans and computed positions of the whole prompt.
        end: Positions `[plan.exact_len, end)` are made by the workers.
        spans: What workers read of donors.
        donors: One per entry of `spans`.
        asynchronous: The request waits for it.
    """

    plan: GraftPlan
    end: int
    spans: tuple[Match, ...]
    donors: tuple[Donor, ...]
    asynchronous: bool

    @property
    def num_tokens(self) -> int:
        """Tokens promised."""
        return self.end - self.plan.exact_len


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its first lookup to its end.

    Attributes:
        request_id: vLLM's name.
        namespace: Who may share with it.
        token_ids: int32, all tokens at the last lookup.
        exact_len: Tokens of vLLM's prefix cache at the last lookup.
        claim: The graft, or None.
        miss: Why there is none.
        captures: Whether its text may become donors.
        lookup_ms: Duration of the last lookup.
        is_admitted: vLLM has given it blocks since the last lookup.
        is_pinned: The claim's donors are kept for it.
        has_failed: A graft of it failed; it is not tried again.
        block_ids: Its blocks, group by group, as far as they were ever given.
        prompt: Text of the prompt that the engine computes and workers capture.
        output: Generated text, captured in chunks; registered at the end.
        gaps: Text of the prompt that the graft computes and captures.
        outcome: What workers told of the graft.
        hashes: Hashes of its blocks, if it was ever to be grafted.
    """

    request_id: str
    namespace: Namespace
    token_ids: NDArray[np.int32]
    exact_len: int
    claim: Claim | None = None
    miss: Miss | None = None
    captures: bool = False
    lookup_ms: float = 0.0
    is_admitted: bool = False
    is_pinned: bool = False
    has_failed: bool = False
    block_ids: list[list[int]] = field(default_factory=list)
    prompt: Piece | None = None
    output: Piece | None = None
    gaps: list[Piece] = field(default_factory=list)
    outcome: GraftOutcome | None = None
    hashes: PrivateBlockHashes | None = None

    def blocks_to(self, stop: int, block_sizes: tuple[int, ...]) -> BlockIds:
        """The blocks of positions `[0, stop)`."""
        return tuple(tuple(ids[: -(-stop // size)]) for ids, size in zip(self.block_ids, block_sizes, strict=True))

    def report(self, policy: str) -> GraftReport:
        """What was reused; the recomputed tokens are known once workers have told."""
        num_tokens, claim, outcome = len(self.token_ids), self.claim, self.outcome
        timings = {"lookup": self.lookup_ms}
        if claim is None or (outcome is not None and (outcome.failed or outcome.fell_back)):
            return GraftReport(
                num_tokens,
                exact_tokens=self.exact_len,
                computed_tokens=num_tokens - self.exact_len,
                policy=policy,
                timings_ms=timings,
                miss=self.miss,
            )
        recomputed = 0
        if outcome is not None:
            recomputed = outcome.recomputed_tokens
            timings |= {"graft": outcome.inject_ms, "recompute": outcome.compute_ms}
        shifted = claim.plan.reused_len - recomputed
        return GraftReport(
            num_tokens,
            exact_tokens=self.exact_len,
            shifted_tokens=shifted,
            recomputed_tokens=recomputed,
            computed_tokens=num_tokens - self.exact_len - shifted,
            spans=tuple(_span_report(span, claim) for span in claim.plan.spans),
            policy=policy,
            timings_ms=timings,
        )


def _span_report(span: Match, claim: Claim) -> SpanReport:
    donor = claim.donors[claim.spans.index(span)]
    source = donor.start_position + span.donor_start
    return SpanReport(
        span.target_start,
        span.length,
        span.donor_id,
        span.donor_start,
        span.target_start - source,
        ReusedAs.SHIFTED,
        donor.generation,
    )
