"""The K/V of one admitted request, as data: who moves them is `CacheManager`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvgraft.types import UNCALIBRATED

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.engine.cold_spans import ColdReads
    from kvgraft.engine.kept_prefixes import PrefixLock
    from kvgraft.engine.request import Request
    from kvgraft.engine.risk import Sampled
    from kvgraft.engine.window_row import WindowRow
    from kvgraft.reuse.lineage import Lineage
    from kvgraft.types import DonorId, GraftPlan, Miss, Namespace, RiskStatement, Substitution


@dataclass(slots=True, eq=False)
class RequestKV:
    """Slots, plan and pins of one attempt of a request, from its admission to its end or its preemption.

    A preempted request gives all of it back and gets another when it begins again: its slots then hold what that attempt
    computes or finds in the prefix cache, which has exact K/V only, so that its lineage begins anew with it.

    Attributes:
        request: The request.
        namespace: Whose K/V it reads and whose its own are: the request's, narrowed to the angles of its length.
        epoch: Of the K/V space when it was admitted. After a reset its K/V may be of weights that have changed.
        lineage: Where the K/V of each position come from.
        plan: Which prompt positions are reused and computed; without a graft everything behind the exact prefix is computed.
        miss: Why nothing is grafted, or None.
        kv_indices: int64, slot of each position; there may be more than tokens so far. All of them are held by the request.
        lock: On the exact prefix.
        donors: Donors of the plan's spans, by span.
        timings_ms: Milliseconds by step.
        moments: `time.perf_counter()` when the lookup (`lookup`) and copies (`graft`) began, and when all that is reused was
            there (`prefill`).
        pinned: Those of the donors that cannot be evicted at present.
        registered: Donors made of a grafted request's own text, by the position where they start.
        made: All donors made of its text, in order; some may be gone.
        reads: Spans of the plan that are on their way from a store; None when there are none any more.
        tiers: Where the donors' K/V lay when it was planned, by span.
        windows: Slots of window layers, where these have slots of their own.
        risk: What may be said about what is grafted.
        sampled: Set if what is grafted is to be audited.
        substitution: Set if what is grafted is another text's.
        stand_in_lock: On the stored prefix of that text, until it is copied.
        draft_room: Positions behind the prompt that have slots for drafted tokens; 0 unless its answer is to be verified.
        stored_len: Positions that it has given the prefix cache before: storing them again is no second use of them.
    """

    request: Request
    namespace: Namespace
    epoch: int
    lineage: Lineage
    plan: GraftPlan
    miss: Miss | None
    kv_indices: NDArray[np.int64]
    lock: PrefixLock | None
    donors: tuple[Donor, ...]
    timings_ms: dict[str, float] = field(default_factory=dict)
    moments: dict[str, float] = field(default_factory=dict)
    pinned: tuple[Donor, ...] = ()
    registered: dict[int, DonorId] = field(default_factory=dict)
    made: list[DonorId] = field(default_factory=list)
    reads: ColdReads | None = None
    tiers: tuple[str, ...] = ()
    windows: WindowRow | None = None
    risk: RiskStatement = UNCALIBRATED
    sampled: Sampled | None = None
    substitution: Substitution | None = None
    stand_in_lock: PrefixLock | None = None
    draft_room: int = 0
    stored_len: int = 0

    @property
    def swa_indices(self) -> NDArray[np.int64] | None:
        """Like `kv_indices` the slots of window layers, where these have slots of their own; -1 where they are given back."""
        return None if self.windows is None else self.windows.swa_indices
