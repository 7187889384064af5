"""One attempt of a request: its decision, its holdings, and what it has given to others. `CacheManager` moves the K/V."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.engine.kv.layer_rows import StateRow, WindowRow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.engine.kv.holdings import Holdings
    from kvgraft.engine.requests.request import Request
    from kvgraft.graft.repair import RepairOutcome
    from kvgraft.reuse.decision import Decision
    from kvgraft.reuse.lineage import Lineage
    from kvgraft.types import DonorId, GraftPlan, Namespace


@dataclass(slots=True, eq=False)
class RequestKV:
    """One attempt of a request, from its admission to its end or its preemption.

    A preempted request gives all of it back and gets another when it begins again: its slots then hold what that attempt
    computes or finds in the prefix cache, which has exact K/V only, so that its lineage begins anew with it.

    Attributes:
        request: As it was asked; what it reuses under which policy is the decision's.
        namespace: The request's, narrowed to the RoPE angles of its length.
        epoch: Of the K/V space at admission. After a reset its K/V may be of weights that have changed.
        lineage: Origin of each position.
        decision: Replaced whole where a graft fails, or arrives in part.
        held: Slots, locks, pins and reads.
        moments: `time.perf_counter()` when the lookup (`lookup`) and copies (`graft`) began, and when all that is reused was
            there (`prefill`).
        is_answered: A token was drawn from its graft: a policy that fails later makes no miss of it.
        draft_room: Positions after the prompt that have slots for drafted tokens; 0 unless its answer is to be verified.
        registered: Donors made of a grafted request's own text, by the position where they start.
        made: All donors made of its text, in order; some may be gone.
        stored_len: Positions that the request has given the prefix cache, earlier attempts included: storing them again is
            no second use of them.
        continued_len: As `stored_len`, of what others go on from.
    """

    request: Request
    namespace: Namespace
    epoch: int
    lineage: Lineage
    decision: Decision
    held: Holdings
    timings_ms: dict[str, float]
    moments: dict[str, float]
    stored_len: int
    draft_room: int = 0
    is_answered: bool = False
    continued_len: int = 0
    registered: dict[int, DonorId] = field(default_factory=dict)
    made: list[DonorId] = field(default_factory=list)

    @property
    def plan(self) -> GraftPlan:
        """Prompt positions that are reused and computed."""
        return self.decision.plan

    @property
    def is_healing(self) -> bool:
        """Whether decode steps compute approximate positions exactly, from the exact frontier on (`repair_rows`)."""
        return self.repairs_after and self.request.repair.rows_per_step > 0 and self.lineage.has_copies

    @property
    def repairs_after(self) -> bool:
        """Whether the first token may be drawn before the policy's choice is computed."""
        return self.request.repairs_after and not self.decision.waits

    def was_repaired(self, outcome: RepairOutcome) -> None:
        """Take down the origin of what a repair computed, or of everything where the policy failed.

        Copies that a token was drawn from are not reported as computed then.
        """
        if outcome.is_exact and self.is_answered:
            self.lineage.withdraw(self.plan.prefix_len)
        else:
            self.lineage.recompute(outcome.work.recomputed_runs)

    @property
    def kv_indices(self) -> NDArray[np.int64]:
        """int64, slot of each position."""
        return self.held.kv_indices

    @property
    def windows(self) -> WindowRow | None:
        """Slots of window layers, where these have slots of their own."""
        return self.held.layers if isinstance(self.held.layers, WindowRow) else None

    @property
    def state(self) -> int | None:
        """Slot of the running state, where layers keep states."""
        return self.held.layers.running if isinstance(self.held.layers, StateRow) else None

    @property
    def snapshots(self) -> dict[int, int]:
        """Slots of states that are recorded while the prompt is computed, by the number of positions that each reads."""
        return self.held.layers.recorded if isinstance(self.held.layers, StateRow) else {}

    @property
    def swa_indices(self) -> NDArray[np.int64] | None:
        """Like `kv_indices` the slots of window layers, where these have slots of their own; -1 where they are given back."""
        return None if self.windows is None else self.windows.swa_indices
