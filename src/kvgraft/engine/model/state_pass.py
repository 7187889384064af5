"""States of the sequences of one forward pass: given to mixers, and moved on when the pass has ended well.

Sequences with equally many rows go through a mixer side by side, so the decode rows of a batch are one call. Where a copy
of a state is asked for amid the rows, the mixer runs them in two calls; attention and all else computes them at once. A state
is written back only after all layers of all sequences are computed: a pass that is abandoned or fails has changed no state,
and its rows can be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvgraft.engine.model.mixers import cache_with, parts_of, state_layer
from kvgraft.errors import CorruptCacheError
from kvgraft.graft.model import PassAbandonedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvgraft.engine.model.mixers import Mixer, OwnForward
    from kvgraft.graft.model import SequenceRows
    from kvgraft.memory.state_pool import StatePool


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Sequences with equally many rows, copied at the same ones.

    Attributes:
        rows: int64 (num_sequences, num_rows), rows of the pass.
        states: int64 (num_sequences,), slots.
        begins: Whether the rows are the first of their sequences.
        copies: Number of rows before a copy, ascending, and its slots, int64 (num_sequences,).
    """

    rows: Tensor
    states: Tensor
    begins: bool
    copies: tuple[tuple[int, Tensor], ...]

    def segments(self) -> Iterator[tuple[int, int, Tensor | None]]:
        """Yield first row, end and slots of the copy after it, None for none, of each run of rows without a copy amid it."""
        start = 0
        for stop, slots in self.copies:
            yield start, stop, slots
            start = stop
        if start < self.rows.shape[1]:
            yield start, self.rows.shape[1], None


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
        self._copies = [_copies(rows) for rows in batch]
        _require_distinct([*self._states, *(slot for copies in self._copies for _, slot in copies)])
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
        """Write the new states into their slots; those of copies have theirs already."""
        for part, states, tensor in self._moved:
            self._pool.scatter(part, states, tensor)
        num_tokens = {}
        for rows, state, copies in zip(self._batch, self._states, self._copies, strict=True):
            num_tokens[state] = _end(rows)
            num_tokens |= {slot: int(rows.positions[0]) + count for count, slot in copies}
        self._pool.note_tokens(num_tokens)
        self._moved = []

    def _mix_group(self, mixer: Mixer, own: OwnForward, rows: Tensor, group: _Group) -> Tensor:
        parts = None
        if not group.begins:
            numbers = range(mixer.first_part, mixer.first_part + len(mixer.places))
            parts = [self._pool.gather(part, group.states) for part in numbers]
        layer = state_layer(mixer, parts)
        cache = cache_with(mixer, layer)
        results = []
        for start, stop, slots in group.segments():
            segment = rows[:, start:stop]
            # A scan that begins every run from nothing goes on row by row; the beginning it computes at once.
            at_once = mixer.takes_runs or (group.begins and not start)
            pieces = [segment] if at_once else list(segment.split(1, dim=1))
            results += [own(piece, cache) for piece in pieces]
            if slots is not None:
                # Written at once, since what follows changes them. The slots are read only after a pass that has ended well.
                for part, tensor in self._parts(mixer, layer):
                    self._pool.scatter(part, slots, tensor)
        self._moved += [(part, group.states, tensor) for part, tensor in self._parts(mixer, layer)]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def _parts(self, mixer: Mixer, layer: object) -> Iterator[tuple[int, Tensor]]:
        """Yield number and tensor of each part that `layer` holds, as the pool keeps it."""
        for number, (place, tensor) in enumerate(zip(mixer.places, parts_of(mixer, layer), strict=True)):
            yield mixer.first_part + number, tensor.to(place.part.dtype)

    def _grouped(self) -> list[_Group]:
        members: dict[tuple[int, bool, tuple[int, ...]], list[tuple[int, int, list[int]]]] = {}
        start = 0
        for rows, state, copies in zip(self._batch, self._states, self._copies, strict=True):
            kind = len(rows.positions), int(rows.positions[0]) == 0, tuple(count for count, _ in copies)
            members.setdefault(kind, []).append((start, state, [slot for _, slot in copies]))
            start += len(rows.positions)
        device = self._pool.device
        groups = []
        for (num_rows, begins, counts), found in members.items():
            firsts, states, slots = zip(*found, strict=True)
            groups.append(
                _Group(
                    torch.tensor(firsts, device=device)[:, None] + torch.arange(num_rows, device=device),
                    torch.tensor(states, device=device),
                    begins,
                    tuple(
                        (count, torch.tensor(after, device=device))
                        for count, after in zip(counts, zip(*slots, strict=True), strict=True)
                    ),
                )
            )
        return groups


def _required_states(batch: Sequence[SequenceRows], pool: StatePool) -> list[int]:
    """Slots of the sequences."""
    states = [rows.state for rows in batch if rows.state is not None]
    if len(states) != len(batch):
        raise CorruptCacheError("rows of a model with states came without the slot of their state")
    for rows, state in zip(batch, states, strict=True):
        first, last, num_tokens = int(rows.positions[0]), int(rows.positions[-1]), pool.num_tokens(state)
        if first != num_tokens or last - first != len(rows.positions) - 1:
            raise CorruptCacheError(
                f"rows {first} to {last} of a sequence, {len(rows.positions)} of them, do not follow its state after "
                f"{num_tokens} tokens"
            )
    return states


def _require_distinct(slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise CorruptCacheError("two sequences of a pass have one state")


def _copies(rows: SequenceRows) -> list[tuple[int, int]]:
    """Number of rows before each copy that is asked for amid or after the rows, ascending, and its slot."""
    first, end = int(rows.positions[0]), _end(rows)
    return [
        (position - first, rows.snapshots[position]) for position in sorted(rows.snapshots) if first < position <= end
    ]


def _end(rows: SequenceRows) -> int:
    return int(rows.positions[-1]) + 1
