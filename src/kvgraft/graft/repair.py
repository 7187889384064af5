"""Repair after the first token: a policy's choice is computed with the second token, in the pass of its decode row.

The first token is drawn from the pass over the live rows alone, which is also the look of policies that look at the query.
Then the chosen tokens are computed, the query rows after them once more, and the row of the first token last: it attends to
what the pass has written by then. From there on the K/V are those of a repair before the first token. The schedule depends on
the prompt, its donors and the policy, never on load (docs/adr/0016).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.errors import PolicyError
    from kvgraft.graft.model import SequenceOutput, SequenceRows
    from kvgraft.graft.prompt_passes import PromptPasses
    from kvgraft.graft.steps import GraftWork


@dataclass(frozen=True, slots=True, eq=False)
class RepairOutcome:
    """The result of a repair.

    Attributes:
        logits: After the last prompt token over the repaired K/V, float32 (vocab_size,).
        next_logits: After the row that rode along, float32 (vocab_size,); None if none did in the last pass.
        work: Of all passes over the prompt, the one that answered included.
        is_exact: Whether the policy failed, and everything was computed in full.
    """

    logits: Tensor
    next_logits: Tensor | None
    work: GraftWork
    is_exact: bool


class Repair:
    """The passes that are left after the first token. Runs nothing; used like `PromptPasses`.

    A `rider`, the decode row of the first token, may go after the last rows of a pass. A policy that asks for another pass
    after it has the row computed again.
    """

    def __init__(self, passes: PromptPasses) -> None:
        """Go on with `passes`, of which one is begun."""
        self._passes = passes
        self._has_rider = False

    @property
    def remaining(self) -> NDArray[np.int64]:
        """Positions that the present pass still has to compute, at least one; later passes may follow."""
        return self._passes.remaining

    def piece(self, limit: int) -> int:
        """Return how many rows of the prompt `next_rows` gives; see `PromptPasses.piece`."""
        return self._passes.piece(limit)

    def next_rows(self, limit: int, rider: SequenceRows | None = None) -> SequenceRows:
        """Return the next `piece(limit)` rows, and `rider` after them where they are a pass's last ones."""
        rows = self._passes.next_rows(limit)
        self._has_rider = rider is not None and self._passes.shows_nothing and self._passes.is_last(limit)
        if rider is None or not self._has_rider:
            return rows
        return replace(
            rows,
            token_ids=np.append(rows.token_ids, rider.token_ids),
            positions=np.append(rows.positions, rider.positions),
            kv_indices=rider.kv_indices,
            swa_indices=rider.swa_indices,
            num_logits=rows.num_logits + rider.num_logits,
            seq_len=rider.seq_len,
        )

    def give_up(self, error: PolicyError) -> None:
        """Compute everything: the pass of `next_rows` failed at its drift correction."""
        self._passes.give_up(error)

    def receive(self, output: SequenceOutput) -> RepairOutcome | None:
        """Take the output of `next_rows`; return the outcome once the policy wants no more."""
        observation = self._passes.receive(output)
        if observation is None or self._passes.go_on(observation):
            return None
        next_logits = output.logits[-1] if self._has_rider else None
        return RepairOutcome(self._passes.logits, next_logits, self._passes.work(), self._passes.is_given_up)
