"""States of the sequences of one forward pass: given to mixers, and moved on when the pass has ended well.

Sequences with equally many rows go through a mixer side by side, so the decode rows of a batch are one call. A state is
written back only after all layers of all sequences are computed: a pass that is abandoned or fails has changed no state,
and its rows can be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvgraft.engine.model.mixers import cache_with, parts_of, state_layer
from kvgraft.errors import CorruptCacheError
from kvgraft.graft.model import PassAbandonedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.engine.model.mixers import Mixer, OwnForward
    from kvgraft.graft.model import SequenceRows
    from kvgraft.memory.state_pool import StatePool


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences with equally many rows.

    Attributes:
        rows: int64 (num_sequences, num_rows), rows of the pass.
        states: int64 (num_sequences,), slots.
        begins: Whether the rows are the first of their sequences.
    """

    rows: Tensor
    states: Tensor
    begins: bool


class StatePass:
    """States of one forward pass; see `PassStates`."""

    def __init__(self, batch: Sequence[SequenceRows], pool: StatePool) -> None:
        """Lay out `batch`.

        Raises:
            CorruptCacheError: Rows are not the next ones of their state.
        """
        self._pool = pool
        self._batch = batch
        self._states = _required_states(batch, pool)
        self._groups = self._grouped()
        self._moved: list[tuple[int, Tensor, Tensor]] = []

    def mix(self, mixer: Mixer, own: OwnForward, hidden: Tensor) -> Tensor:
        """Run `mixer` over the rows of all sequences.

        Args:
            mixer: Which.
            own: Its own forward.
            hidden: (1, rows, width); rows beyond those of the batch belong to no sequence.

        Returns:
            (1, rows, width) of the result, zeros for rows of no sequence.

        Raises:
            PassAbandonedError: The pass is not to go on.
        """
        is_abandoned = self._batch[0].is_abandoned if len(self._batch) == 1 else None
        if is_abandoned is not None and is_abandoned():
            raise PassAbandonedError
        mixed: Tensor | None = None
        for group in self._groups:
            result = self._mix_group(mixer, own, hidden[0][group.rows], group)
            if mixed is None:
                mixed = result.new_zeros(1, hidden.shape[1], result.shape[-1])
            mixed[0][group.rows] = result
        assert mixed is not None, "a pass has rows"
        return mixed

    def commit(self) -> None:
        """Write the new states into their slots."""
        for part, states, tensor in self._moved:
            self._pool.scatter(part, states, tensor)
        self._pool.advance(self._states, np.asarray([len(rows.positions) for rows in self._batch], np.int64))
        self._moved = []

    def _mix_group(self, mixer: Mixer, own: OwnForward, rows: Tensor, group: _Group) -> Tensor:
        parts = None
        if not group.begins:
            numbers = range(mixer.first_part, mixer.first_part + len(mixer.places))
            parts = [self._pool.gather(part, group.states) for part in numbers]
        layer = state_layer(mixer, parts)
        cache = cache_with(mixer, layer)
        # A scan that begins every run from nothing goes on row by row; the beginning it computes at once.
        at_once = mixer.takes_runs or group.begins
        pieces = [rows] if at_once else list(rows.split(1, dim=1))
        results = [own(piece, cache) for piece in pieces]
        for number, (place, tensor) in enumerate(zip(mixer.places, parts_of(mixer, layer), strict=True)):
            self._moved.append((mixer.first_part + number, group.states, tensor.to(place.part.dtype)))
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _grouped(self) -> list[_Group]:
        members: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        start = 0
        for rows, state in zip(self._batch, self._states.tolist(), strict=True):
            kind = len(rows.positions), int(rows.positions[0]) == 0
            members.setdefault(kind, []).append((start, state))
            start += len(rows.positions)
        device = self._pool.device
        return [
            _Group(
                torch.tensor([first for first, _ in found], device=device)[:, None]
                + torch.arange(num_rows, device=device),
                torch.tensor([state for _, state in found], device=device),
                begins,
            )
            for (num_rows, begins), found in members.items()
        ]


def _required_states(batch: Sequence[SequenceRows], pool: StatePool) -> np.ndarray:
    """Slots of the sequences, int64 (n,)."""
    states = [rows.state for rows in batch if rows.state is not None]
    if len(states) != len(batch):
        raise CorruptCacheError("rows of a model with states came without the slot of their state")
    if len(set(states)) != len(states):
        raise CorruptCacheError("two sequences of a pass have one state")
    for rows, state in zip(batch, states, strict=True):
        first, last, num_tokens = int(rows.positions[0]), int(rows.positions[-1]), pool.num_tokens(state)
        if first != num_tokens or last - first != len(rows.positions) - 1:
            raise CorruptCacheError(
                f"rows {first} to {last} of a sequence, {len(rows.positions)} of them, do not follow its state after "
                f"{num_tokens} tokens"
            )
    return np.asarray(states, np.int64)
