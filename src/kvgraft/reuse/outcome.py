"""How the copy of a graft, or its repair, ended."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraft.types import MissReason


@dataclass(frozen=True, slots=True)
class GraftOutcome:
    """Outcome of one graft on one rank. Plain values: engines send it between processes.

    Attributes:
        recomputed_runs: Ascending `(start, length)` of reused tokens that the policy had computed again.
        inject_ms: Milliseconds of copying and rotating.
        compute_ms: Milliseconds of forward passes.
        fell_back: Why the reused tokens were computed instead, in one line; empty where they were not.
        failed: Nothing was made; the engine computes the positions.
        corrected_tokens: Reused tokens that were not computed again, and were corrected by the drift of those that were.
        read_ms: Milliseconds until stores had given what is read of them.
        is_store_miss: It failed because a store did not give what was to be read from it, or not in time.
        is_policy_error: It failed, or fell back, because the selection policy did.
        is_gone: It failed because what was to be worked on had been forgotten, which is no error.
        waited: Why its repair was made at once, though it was to come with the second token; empty where it was not.
    """

    recomputed_runs: tuple[tuple[int, int], ...]
    inject_ms: float
    compute_ms: float
    fell_back: str = ""
    failed: bool = False
    corrected_tokens: int = 0
    read_ms: float = 0.0
    is_store_miss: bool = False
    is_policy_error: bool = False
    is_gone: bool = False
    waited: str = ""

    @property
    def is_error(self) -> bool:
        """Whether something failed that should not: not a store, or a reset."""
        return bool(self.fell_back) and not (self.is_store_miss or self.is_gone)

    @property
    def miss_reason(self) -> MissReason:
        """Why nothing is left of a graft that fell back or failed."""
        if self.is_policy_error:
            return MissReason.POLICY_ERROR
        if self.is_gone:
            return MissReason.NO_DONORS
        return MissReason.STORE if self.is_store_miss else MissReason.ERROR

    def worst(self, other: GraftOutcome) -> GraftOutcome:
        """Join two ranks' outcomes: a failure of one is a failure of all, times are those of the slowest."""
        return GraftOutcome(
            self.recomputed_runs or other.recomputed_runs,  # the same on all ranks, but for one that failed
            max(self.inject_ms, other.inject_ms),
            max(self.compute_ms, other.compute_ms),
            self.fell_back or other.fell_back,
            self.failed or other.failed,
            max(self.corrected_tokens, other.corrected_tokens),
            max(self.read_ms, other.read_ms),
            self.is_store_miss or other.is_store_miss,
            self.is_policy_error or other.is_policy_error,
            self.is_gone or other.is_gone,
            self.waited or other.waited,
        )
