"""Running states of sequences in layers that have no K/V: linear attention, state-space layers and short convolutions.

A state is all that such a layer keeps of the tokens before: one of fixed size per sequence, however long that is. It has
no positions, so it cannot be cut, moved or joined; it can be copied, and go on from there. Every slot knows how many
tokens its state has seen, so that rows are never computed on a state of other tokens' number. Who holds a slot is the
caller's to know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a state, of one layer: the last inputs of a convolution, or a recurrent state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one state's tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class StateBlock:
    """A state outside a pool. The tensors are not written once the block exists.

    Attributes:
        parts: One tensor per part, on the CPU.
        num_tokens: Tokens that the state has seen.
    """

    parts: tuple[torch.Tensor, ...]
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


class StatePool:
    """Preallocated states of `num_states` sequences. They start cleared: zeros that have seen no token. Not thread-safe.

    Attributes:
        parts: Shape and dtype of each tensor of a state.
        num_states: Slots.
        device: Where they lie.
    """

    def __init__(
        self,
        parts: Sequence[StatePart],
        num_states: int,
        device: torch.device | str = "cpu",
        *,
        pin_memory: bool = False,
    ) -> None:
        """Allocate the slots.

        Args:
            parts: Shape and dtype of each tensor of a state.
            num_states: Slots.
            device: Where they lie.
            pin_memory: Page-locked, for states on the CPU that a GPU reads and writes.

        Raises:
            ConfigError: There are no parts or no states.
        """
        if not parts or num_states < 1:
            raise ConfigError(f"a pool of states needs parts and states, not {len(parts)} and {num_states}")
        self.parts = tuple(parts)
        self.num_states = num_states
        self.device = torch.device(device)
        self._num_tokens = np.zeros(num_states, np.int64)
        # Filled, not `torch.zeros`: that leaves pages to be committed by the first request that writes to them.
        self._tensors = tuple(
            torch.empty((num_states, *part.shape), dtype=part.dtype, device=self.device, pin_memory=pin_memory).fill_(0)
            for part in self.parts
        )

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one slot."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.bytes_per_state * self.num_states

    def num_tokens(self, state: int) -> int:
        """Tokens that a state has seen; 0 if it is cleared."""
        self._require([state])
        return int(self._num_tokens[state])

    def clear(self, state: int) -> None:
        """Make a slot the beginning of a sequence."""
        self._require([state])
        for tensor in self._tensors:
            tensor[state].zero_()
        self._num_tokens[state] = 0

    def copy(self, source: int, target: int) -> None:
        """Make `target` the same state as `source`; the two go on independently."""
        self._require([source, target])
        if source == target:
            return
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])
        self._num_tokens[target] = self._num_tokens[source]

    def copy_from(self, other: StatePool, source: int, target: int) -> None:
        """Make `target` the same state as `source` of another pool of the same parts, which may lie on another device.

        The copy is done when the call returns.
        """
        self._require([target])
        other._require([source])
        for ours, theirs in zip(self._tensors, other._tensors, strict=True):
            ours[target].copy_(theirs[source])
        self._num_tokens[target] = other._num_tokens[source]

    def export(self, state: int) -> StateBlock:
        """Copy a state into CPU memory of its own, the caller's."""
        self._require([state])
        # `to` returns the pool's own memory where that is the CPU's already.
        parts = tuple(tensor[state].detach().to("cpu", copy=True) for tensor in self._tensors)
        return StateBlock(parts, int(self._num_tokens[state]))

    def load(self, state: int, block: StateBlock) -> None:
        """Make a slot the state that was exported.

        Raises:
            ConfigError: The block is of another model's states.
        """
        self._require([state])
        given = [(tuple(part.shape), part.dtype) for part in block.parts]
        if given != [(part.shape, part.dtype) for part in self.parts]:
            raise ConfigError("a state of other layers does not fit this pool; load one of the same model")
        for tensor, part in zip(self._tensors, block.parts, strict=True):
            tensor[state].copy_(part)
        self._num_tokens[state] = block.num_tokens

    def gather(self, part: int, states: torch.Tensor) -> torch.Tensor:
        """Copy one part of some states, `(len(states), *shape)`; `states` is int64 on the pool's device."""
        return self._tensors[part].index_select(0, states)

    def scatter(self, part: int, states: torch.Tensor, values: torch.Tensor) -> None:
        """Store one part of some states, `(len(states), *shape)` in the pool's dtype; no two are the same."""
        self._tensors[part].index_copy_(0, states, values)

    def note_tokens(self, num_tokens: Mapping[int, int]) -> None:
        """Say how many tokens states have seen that were stored part by part, by slot."""
        states = list(num_tokens)
        self._require(states)
        self._num_tokens[states] = list(num_tokens.values())

    def _require(self, states: Sequence[int] | NDArray[np.int64]) -> None:
        if min(states) < 0 or max(states) >= self.num_states:
            raise ConfigError(f"states must lie in [0, {self.num_states})")
