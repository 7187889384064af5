"""What scheduler and workers tell each other. Plain values: they are pickled, once per engine step and rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.types import DonorId, GraftPlan, Match

TextId = int
"""Names text that is being captured and is no donor yet."""

BlockIds = tuple[tuple[int, ...], ...]
"""Per KV cache group the block of each block-sized range of positions, from position 0; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy the K/V of positions `[start, stop)` to host memory, behind what the text has already.

    With a `donor_id` the text is complete then and becomes that donor.
    """

    text_id: TextId
    start: int
    stop: int
    block_ids: BlockIds
    donor_id: DonorId | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """The text was completed in an earlier step: keep it under this donor."""

    text_id: TextId
    donor_id: DonorId


@dataclass(frozen=True, slots=True, eq=False)
class Graft:
    """Make positions `[plan.exact_len, end)` of a request computed.

    Attributes:
        request_id: vLLM's name of the request.
        token_ids: int32 `(plan.num_tokens,)`, the prompt: policies may look at what stands behind the graft.
        plan: Reused spans and computed positions, of which those below `end` are meant.
        spans: What is read of donors: the plan's spans, and text in front of them that sliding windows reach back to.
        source_starts: Per entry of `spans` the position at which its first token was encoded.
        end: First position that is left to the engine.
        block_ids: Blocks of the request.
        captures: Texts `(text_id, start, stop)` of computed text to keep.
        tail: CapturedText that the engine computes behind the graft; worth nothing if the graft fails.
        asynchronous: The request waits until `WorkerReport.loaded` names it.
    """

    request_id: str
    token_ids: NDArray[np.int32]
    plan: GraftPlan
    spans: tuple[Match, ...]
    source_starts: tuple[int, ...]
    end: int
    block_ids: BlockIds
    captures: tuple[tuple[TextId, int, int], ...]
    tail: TextId | None
    asynchronous: bool


@dataclass(frozen=True, slots=True)
class StepCommands:
    """What workers do in one step, in the order of the fields; later fields never undo what earlier ones need.

    Attributes:
        reset: First of all, forget all donors and texts and give grafts under way up.
        cancels: Requests that ended while their graft was under way.
        seals: Texts that are donors now; grafts of this step may read them.
        grafts: New grafts; their donors are opened at once.
        discards: Texts that will not become donors.
        drops: Donors to forget.
        captures: After the forward pass of this step.
    """

    reset: bool = False
    cancels: tuple[str, ...] = ()
    seals: tuple[Seal, ...] = ()
    grafts: tuple[Graft, ...] = ()
    discards: tuple[TextId, ...] = ()
    drops: tuple[DonorId, ...] = ()
    captures: tuple[Capture, ...] = ()


@dataclass(frozen=True, slots=True)
class GraftOutcome:
    """What became of one graft on one rank.

    Attributes:
        recomputed_tokens: Reused tokens that the policy had computed again.
        inject_ms: Milliseconds of copying and rotating.
        compute_ms: Milliseconds of forward passes.
        fell_back: The reused tokens were computed instead; why, in one line.
        failed: Nothing was made; vLLM computes the positions.
        corrected_tokens: Reused tokens that were not computed again, and were corrected by the drift of those that were.
    """

    recomputed_tokens: int
    inject_ms: float
    compute_ms: float
    fell_back: str = ""
    failed: bool = False
    corrected_tokens: int = 0

    def worst(self, other: GraftOutcome) -> GraftOutcome:
        """Join two ranks' outcomes: a failure of one is a failure of all, times are those of the slowest."""
        return GraftOutcome(
            max(self.recomputed_tokens, other.recomputed_tokens),
            max(self.inject_ms, other.inject_ms),
            max(self.compute_ms, other.compute_ms),
            self.fell_back or other.fell_back,
            self.failed or other.failed,
            max(self.corrected_tokens, other.corrected_tokens),
        )


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a rank did in a step.

    Attributes:
        outcomes: By request, grafts that are complete.
        lost_texts: Captures that failed.
        lost_donors: Donors whose K/V could not be kept.
        refusal: Why this rank grafts nothing, or empty.
        host_bytes: Host memory of donors and texts, on the fullest rank.
        weights_changed: The model is another one: everything that was captured before is forgotten.
    """

    outcomes: dict[str, GraftOutcome] = field(default_factory=dict)
    lost_texts: frozenset[TextId] = frozenset()
    lost_donors: frozenset[DonorId] = frozenset()
    refusal: str = ""
    host_bytes: int = 0
    weights_changed: bool = False

    def joined(self, other: WorkerReport) -> WorkerReport:
        """Join the reports of two ranks."""
        outcomes = dict(self.outcomes)
        for request_id, outcome in other.outcomes.items():
            known = outcomes.get(request_id)
            outcomes[request_id] = outcome if known is None else known.worst(outcome)
        return WorkerReport(
            outcomes,
            self.lost_texts | other.lost_texts,
            self.lost_donors | other.lost_donors,
            self.refusal or other.refusal,
            max(self.host_bytes, other.host_bytes),
            self.weights_changed or other.weights_changed,
        )
