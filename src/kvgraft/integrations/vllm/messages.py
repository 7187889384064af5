"""Messages between scheduler and workers. Plain values: they are pickled, once per engine step and rank."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.memory.store.record import DonorRecord
    from kvgraft.reuse.outcome import GraftOutcome
    from kvgraft.types import DonorId, GraftPlan, Match

TextId = int
"""Names text that is being captured and is no donor yet."""

BlockIds = tuple[tuple[int, ...], ...]
"""Per KV cache group the block of each block-sized range of positions, from position 0; 0 where there is none."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Copy the K/V of positions `[start, stop)` to host memory, after what the text has already.

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


@dataclass(frozen=True, slots=True)
class Write:
    """Put a donor into the stores, after the captures of this step."""

    donor_id: DonorId
    record: DonorRecord


@dataclass(frozen=True, slots=True)
class DonorToRead:
    """A donor of which only a store has the K/V, in the object `key`.

    One that is promoted is read whole and kept in host memory from then on; there is room.
    """

    key: str
    num_tokens: int
    is_promoted: bool


@dataclass(frozen=True, slots=True, eq=False)
class Graft:
    """Make positions `[plan.prefix_len, end)` of a request computed.

    Attributes:
        token_ids: int32 `(plan.num_tokens,)`, the prompt: policies may look at text after the graft.
        plan: Reused spans and computed positions, of which those below `end` are meant.
        spans: The plan's spans, and text before them that sliding windows reach back to; both are read of donors.
        source_starts: Per entry of `spans` the position at which its first token was encoded.
        end: First position that is left to the engine.
        captures: Texts `(text_id, start, stop)` of computed text to keep.
        tail: Text that the engine computes after the graft; worth nothing if the graft fails.
        asynchronous: The request waits until `WorkerReport.loaded` names it.
        is_substituted: The donors have other text: no policy chooses from it and nothing is corrected.
        stored: Donors that are read from a store.
        deadline_s: Seconds that these reads may take.
        void: Why nothing may be grafted though vLLM was promised it, or empty: the graft fails at once.
        is_gone: It is void because what it was to be made of has been forgotten, which is no error.
        repairs_after: What the policy chooses is left for a `GraftRepair`.
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
    is_substituted: bool = False
    stored: Mapping[DonorId, DonorToRead] = field(default_factory=dict)
    deadline_s: float = math.inf
    void: str = ""
    repairs_after: bool = False
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class GraftRepair:
    """Compute what the policy chooses of a request's graft, before the forward pass of its second token.

    All K/V of its prompt lie in `block_ids`.
    """

    request_id: str
    block_ids: BlockIds


@dataclass(frozen=True, slots=True)
class StepCommands:
    """Commands for one step, carried out in the order of the fields; later ones never undo what earlier ones need.

    Attributes:
        reset: Forget all donors and texts, and give up grafts under way.
        cancels: Requests that ended, or began again, while their graft or its repair was under way.
        seals: Texts that are donors now; grafts of this step may read them.
        grafts: New grafts; their donors are opened at once.
        discards: Texts that will not become donors.
        repairs: Of grafts that are complete; they need no donor.
        captures: After the forward pass of this step; `writes` come after them.
        is_idle: The engine computes nothing in this step: it may wait a moment for a store.
        known_changes: Number of changes of the weights in place that the scheduler knows. Workers that know of more capture
            nothing: texts may begin with K/V of vLLM's prefix cache that are of the weights of before.
        is_report_due: Workers report after this step even if nothing is new: the scheduler has requests to let go on.
    """

    reset: bool = False
    cancels: tuple[str, ...] = ()
    seals: tuple[Seal, ...] = ()
    grafts: tuple[Graft, ...] = ()
    discards: tuple[TextId, ...] = ()
    drops: tuple[DonorId, ...] = ()
    repairs: tuple[GraftRepair, ...] = ()
    captures: tuple[Capture, ...] = ()
    writes: tuple[Write, ...] = ()
    is_idle: bool = False
    known_changes: int = 0
    is_report_due: bool = False

    @property
    def are_for_all_ranks(self) -> bool:
        """Whether there is anything to do before the forward pass."""
        named = (self.cancels, self.seals, self.grafts, self.discards, self.drops, self.repairs, self.captures)
        return self.reset or any(named)


@dataclass(frozen=True, slots=True)
class ReadCost:
    """Expected cost of a rank's reads from its stores, as it has measured them; infinite while none answers.

    Attributes:
        per_span_s: Seconds of a read of any length.
        per_token_s: Seconds of every token besides.
    """

    per_span_s: float
    per_token_s: float

    def worst(self, other: ReadCost) -> ReadCost:
        """Join two ranks' costs: all wait for the slowest."""
        return ReadCost(max(self.per_span_s, other.per_span_s), max(self.per_token_s, other.per_token_s))


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A rank's report of its stores.

    Attributes:
        spaces: By rank the name of its space; empty if it has not changed.
        cost: Of reads; None if it has not changed.
        promoted: Donors that are in host memory now, on all ranks.
        unpromoted: Donors that were to be and are not, on any.
        unreadable: Keys of objects that are gone or damaged.
        counts: Reads and writes since the last report, by the key of their metric.
    """

    spaces: Mapping[int, str] = field(default_factory=dict)
    cost: ReadCost | None = None
    promoted: frozenset[DonorId] = frozenset()
    unpromoted: frozenset[DonorId] = frozenset()
    unreadable: frozenset[str] = frozenset()
    counts: Mapping[str, float] = field(default_factory=dict)

    def joined(self, other: StoreReport) -> StoreReport:
        """Join the reports of two ranks."""
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        counts = dict(self.counts)
        for name, value in other.counts.items():
            counts[name] = counts.get(name, 0) + value
        return StoreReport(
            {**self.spaces, **other.spaces},
            costs[0].worst(costs[-1]) if costs else None,
            self.promoted | other.promoted,
            self.unpromoted | other.unpromoted,
            self.unreadable | other.unreadable,
            counts,
        )


NOTHING_OF_STORES = StoreReport()


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A rank's report of a step.

    Attributes:
        outcomes: By request, grafts that are complete.
        repairs: By request, all of its graft after its repair; one that failed was not begun, and nothing has changed.
        lost_texts: Texts that are not captured, because that failed, or a graft before them.
        num_failed_copies: Texts and donors that could not be copied to host memory, on the rank with most of them.
        lost_donors: Donors whose K/V could not be kept.
        refusal: Why this rank grafts nothing, or empty.
        host_bytes: Host memory of donors and texts, on the fullest rank.
        num_weight_changes: How often the weights were changed in place so far: where it grows, the model is another one,
            and everything captured before is forgotten. In every report, so that none is missed with one that is lost.
        is_proved: The self-check has passed, on all ranks; reported once.
        fallback: Name of the policy that took the place of the configured one, or empty.
    """

    outcomes: dict[str, GraftOutcome] = field(default_factory=dict)
    lost_texts: frozenset[TextId] = frozenset()
    lost_donors: frozenset[DonorId] = frozenset()
    refusal: str = ""
    host_bytes: int = 0
    num_weight_changes: int = 0
    store: StoreReport = NOTHING_OF_STORES
    is_proved: bool = False
    repairs: dict[str, GraftOutcome] = field(default_factory=dict)
    num_failed_copies: int = 0
    fallback: str = ""

    def joined(self, other: WorkerReport) -> WorkerReport:
        """Join the reports of two ranks."""
        return WorkerReport(
            _worst(self.outcomes, other.outcomes),
            self.lost_texts | other.lost_texts,
            self.lost_donors | other.lost_donors,
            self.refusal or other.refusal,
            max(self.host_bytes, other.host_bytes),
            max(self.num_weight_changes, other.num_weight_changes),
            self.store.joined(other.store),
            self.is_proved or other.is_proved,  # ranks vote on it
            _worst(self.repairs, other.repairs),
            max(self.num_failed_copies, other.num_failed_copies),
            self.fallback or other.fallback,
        )


def _worst(mine: Mapping[str, GraftOutcome], others: Mapping[str, GraftOutcome]) -> dict[str, GraftOutcome]:
    """Join two ranks' outcomes by request."""
    joined = dict(mine)
    for request_id, outcome in others.items():
        known = joined.get(request_id)
        joined[request_id] = outcome if known is None else known.worst(outcome)
    return joined
