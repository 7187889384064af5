"""Sparse prefill: compute the gaps of a grafted prompt and the reused tokens a policy chooses, and nothing else.

`SparsePrefill` decides and runs nothing: it names `SequenceRows` to compute and receives the `SequenceOutput`. So a
scheduler can put the rows of several requests into one forward pass, in pieces as small as it likes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.graft.model import NO_SNAPSHOTS
from kvgraft.graft.prompt_passes import PromptPasses
from kvgraft.graft.repair import Repair

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.errors import PolicyError
    from kvgraft.graft.model import SequenceOutput, SequenceRows
    from kvgraft.graft.select.base import Observation
    from kvgraft.graft.steps import GraftSteps, GraftWork
    from kvgraft.types import TokenArray


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOutcome:
    """The result of a prefill.

    Attributes:
        logits: After the last prompt token, float32 (vocab_size,).
        work: Of all passes so far.
        repair: The policy's choice, still to be computed; None if nothing is left.
    """

    logits: Tensor
    work: GraftWork
    repair: Repair | None = None


class SparsePrefill:
    """The prefill of one prompt: rows to compute, in passes that its policy asks for and pieces that its caller cuts.

    Used like `PromptPasses`, but that `receive` returns an outcome once the policy wants no more.
    """

    def __init__(
        self,
        token_ids: TokenArray,
        kv_indices: NDArray[np.int64],
        steps: GraftSteps,
        *,
        swa_indices: NDArray[np.int64] | None = None,
        state: int | None = None,
        snapshots: Mapping[int, int] = NO_SNAPSHOTS,
        on_policy_error: Callable[[PolicyError], None] | None = None,
    ) -> None:
        """Ask the policy for its first step.

        Args:
            token_ids: int64 (num_tokens,), the prompt.
            kv_indices: int64, slots by position.
            steps: Of the whole prompt, none of them taken.
            swa_indices: As `kv_indices` of window layers, where these have slots of their own.
            state: Slot of the running state, where layers keep states; nothing is grafted then.
            snapshots: See `SequenceRows`; may be filled between pieces.
            on_policy_error: Called once if the policy fails: nothing is grafted then.
        """
        self._steps = steps
        self._passes = PromptPasses(
            token_ids,
            kv_indices,
            steps,
            swa_indices=swa_indices,
            state=state,
            snapshots=snapshots,
            on_policy_error=on_policy_error,
        )
        self._begin()

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present pass still has to compute, at least one; later passes may follow."""
        return self._passes.remaining

    def piece(self, limit: int) -> int:
        """Return how many rows `next_rows(limit)` gives; see `PromptPasses.piece`."""
        return self._passes.piece(limit)

    def next_rows(self, limit: int) -> SequenceRows:
        """Return the next `piece(limit)` rows of the present pass; the same until `receive` is called."""
        return self._passes.next_rows(limit)

    def receive(self, output: SequenceOutput) -> PrefillOutcome | None:
        """Take the output of `next_rows`; return the outcome once there are logits to serve."""
        observation = self._passes.receive(output)
        return None if observation is None else self._seen(observation)

    def give_up(self, error: PolicyError) -> None:
        """Compute everything: the pass of `next_rows` failed at its drift correction."""
        self._passes.give_up(error)

    def _begin(self) -> None:
        self._passes.begin(self._steps.first)

    def _seen(self, observation: Observation) -> PrefillOutcome | None:
        if self._passes.go_on(observation):
            return None
        return PrefillOutcome(self._passes.logits, self._steps.work())


class AnswerFirst(SparsePrefill):
    """A prefill that computes the live rows alone; its outcome brings the policy's choice as a `Repair`.

    A policy that fails at its choice fails before a token was drawn: everything is computed first, as by any prefill.
    """

    def _begin(self) -> None:
        self._passes.begin(self._steps.answer)

    def _seen(self, observation: Observation) -> PrefillOutcome | None:
        if self._steps.is_given_up:
            return super()._seen(observation)
        logits, work = self._passes.logits, self._steps.work()
        has_more = self._passes.repair(observation)
        if self._passes.is_given_up:
            return None
        return PrefillOutcome(logits, work, Repair(self._passes) if has_more else None)
