"""How far keys are from reused ones in an early layer, for policies that choose by it: layers one by one, in two passes.

Loaded where such a policy runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvgraft.integrations.vllm.worker.passes import GraftedPrompt, GraftPass
from kvgraft.integrations.vllm.worker.ranks import summed_over_ranks
from kvgraft.integrations.vllm.worker.virtual_batch import RowRuns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.vllm.worker.decoder_stack import DecoderStack

CHECK_LAYER = 1
"""The first layer with keys that depend on the text before a token."""


class KeyDeviationPass(GraftPass):
    """Every position through the layers up to `CHECK_LAYER`; keeps hidden states, 2 * width numbers per position.

    Source: CacheBlend, https://arxiv.org/abs/2405.16444.
    """

    def __init__(
        self, prompt: GraftedPrompt, rows: NDArray[np.int64], stack: DecoderStack, *, reused: NDArray[np.int64]
    ) -> None:
        """Compute `rows`, and compare the keys of those that are `reused`, ascending."""
        super().__init__(prompt, rows)
        self._stack = stack
        self._reused = reused
        self._first = int(rows[0])
        self._states: list[tuple[Tensor, Tensor]] = []
        self._deviation = torch.zeros(int(rows[-1]) + 1)

    def deviation(self) -> NDArray[np.float32]:
        """See `GraftPass`; summed over the check layer's channels and all ranks' heads."""
        found: NDArray[np.float32] = summed_over_ranks(self._deviation).numpy()
        return found

    def continued(self, rows: NDArray[np.int64]) -> GraftPass | None:
        """See `GraftPass`; rows before the first one that was computed have no hidden states here."""
        if len(rows) and int(rows[0]) < self._first:
            return None
        hidden, residual = (torch.cat([state[part] for state in self._states]) for part in (0, 1))
        chosen = torch.from_numpy(rows - self._first).to(hidden.device)
        return LaterLayersPass(self._prompt, rows, self._stack, (hidden[chosen], residual[chosen]))

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt = self._prompt
        reused = self._reused[(self._reused >= rows[0]) & (self._reused <= rows[-1])]
        place = prompt.homes[0].place(reused)
        before = place.read(CHECK_LAYER)[0]
        tokens = torch.from_numpy(prompt.token_ids[rows]).to(prompt.rank.device)
        with prompt.rank.batch(RowRuns.of(rows), prompt.homes) as positions:
            hidden = self._stack.embed(tokens)
            hidden, residual = self._stack.run(positions, hidden, None, 0, CHECK_LAYER + 1)
        assert residual is not None
        self._states.append((hidden, residual))
        after = place.read(CHECK_LAYER)[0]
        self._deviation[torch.from_numpy(reused)] = (after.float() - before.float()).square().sum((1, 2)).cpu()


class LaterLayersPass(GraftPass):
    """Chosen positions through the layers after `CHECK_LAYER`, from the hidden states of a `KeyDeviationPass`."""

    def __init__(
        self, prompt: GraftedPrompt, rows: NDArray[np.int64], stack: DecoderStack, states: tuple[Tensor, Tensor]
    ) -> None:
        """Take hidden states and residuals of `rows`, each `(num_rows, width)`."""
        super().__init__(prompt, rows)
        self._stack = stack
        self._hidden, self._residual = states

    def _run(self, rows: NDArray[np.int64]) -> None:
        prompt, stack = self._prompt, self._stack
        part = slice(self._done, self._done + len(rows))
        with prompt.rank.batch(RowRuns.of(rows), prompt.homes) as positions:
            stack.run(positions, self._hidden[part], self._residual[part], CHECK_LAYER + 1, len(stack.layers))
