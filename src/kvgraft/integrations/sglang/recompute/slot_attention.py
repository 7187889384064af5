"""Attention of chosen rows of one prompt over slots, layer by layer, in the place of SGLang's attention backend.

SGLang's kernels take consecutive rows of requests that have a row in its table, and give no weights away. Rows here stand
anywhere, the slots are named one by one, and keys and values are gathered per layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvgraft.graft.drift_layout import RunLayout
from kvgraft.graft.row_attention import AttentionRule, GatheredKV, QueryRows, attend

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.model import DriftRuns
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers

_BLOCK_ROWS = 64
"""Rows that share their keys in one call of the fused kernel."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptKV:
    """The K/V of the beginning of a prompt: `slots`, int64 by position, of SGLang's buffers and on their device."""

    buffers: KVBuffers
    slots: Tensor

    def __len__(self) -> int:
        return len(self.slots)

    def gather(self, layer: int, stop: int) -> GatheredKV:
        """Copy the K/V of positions `[0, stop)` of one layer."""
        keys, values = self.buffers.place(self.slots[:stop]).read(layer)
        return GatheredKV(torch.arange(stop, device=self.slots.device), keys, values)


class SlotAttention(ABC):
    """The attention backend of a pass over `rows`, ascending positions of one prompt; SGLang's layers call it.

    Nothing is raised inside the model, where ranks wait for one another between the layers: a failure is kept in `failure`,
    and the pass goes on with zeros and writes nothing more.
    """

    def __init__(self, prompt: PromptKV, rows: NDArray[np.int64]) -> None:
        self.failure: Exception | None = None
        self._prompt = prompt
        self._rows = torch.from_numpy(rows).to(prompt.slots.device)

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: Any,  # noqa: ANN401 - SGLang's RadixAttention
        *_: object,
        sinks: Tensor | None = None,
        **__: object,
    ) -> Tensor:
        """Attend for one layer.

        Args:
            query: (num_rows, num_heads * head_dim), rotated.
            keys: (num_rows, num_kv_heads, head_dim), rotated.
            values: Likewise.
            layer: Says how.
            sinks: (num_heads,), per head the score of one more key whose value is 0; None for none.

        Returns:
            Like `query`.
        """
        if self.failure is None:
            try:
                rows = QueryRows(self._rows, query.view(-1, layer.tp_q_head_num, layer.head_dim))
                rule = AttentionRule(float(layer.scaling), softcap=float(layer.logit_cap or 0), sinks=sinks)
                return self._attend(int(layer.layer_id), rule, rows, keys, values).view(query.shape)
            except Exception as error:  # noqa: BLE001 - raised once the pass is over
                self.failure = error
        return torch.zeros_like(query)

    @abstractmethod
    def _attend(self, layer: int, rule: AttentionRule, rows: QueryRows, keys: Tensor, values: Tensor) -> Tensor: ...


class Look(SlotAttention):
    """Sums the attention of rows, and writes nothing: K/V after the prompt's beginning live as long as the layer.

    `mass` is float32 by position of the prompt, summed over the observed rows, this rank's heads, and layers.
    """

    def __init__(self, prompt: PromptKV, rows: NDArray[np.int64], num_observed: int) -> None:
        """Observe the last `num_observed` of `rows`."""
        super().__init__(prompt, rows)
        self.mass = torch.zeros(int(rows[-1]) + 1, device=prompt.slots.device)
        self._num_observed = num_observed
        self._first_after = int(np.searchsorted(rows, len(prompt)))

    def _attend(self, layer: int, rule: AttentionRule, rows: QueryRows, keys: Tensor, values: Tensor) -> Tensor:
        after = slice(self._first_after, None)
        later = GatheredKV(rows.positions[after], keys[after], values[after])
        seen = self._prompt.gather(layer, len(self._prompt)).followed_by(later)
        return attend(rule, rows, seen, self.mass, self._num_observed)


class Recomputation(SlotAttention):
    """Writes the K/V of rows into their slots, corrects the drift of others, and attends to both.

    All rows, and all positions that are corrected, must lie in slots of the request alone.
    """

    def __init__(self, prompt: PromptKV, rows: NDArray[np.int64], drift: DriftRuns | None) -> None:
        """Compute `rows`, all of them in the prompt's beginning; correct the runs of `drift`."""
        super().__init__(prompt, rows)
        self._own = prompt.buffers.place(prompt.slots[self._rows])
        self._row_positions = rows
        self._drift = None if drift is None else _PassDrift(drift, prompt, rows)

    def _attend(self, layer: int, rule: AttentionRule, rows: QueryRows, keys: Tensor, values: Tensor) -> Tensor:
        # Before anything is written: the reused K/V of the sampled tokens are read from their slots.
        if self._drift is not None:
            self._drift.correct(layer, keys, values)
        self._own.write(layer, keys, values)
        stop = int(self._row_positions[-1]) + 1
        seen = self._prompt.gather(layer, stop)
        if rule.sinks is None and not rule.softcap:
            return attend_in_blocks(rule.scale, self._row_positions, rows, seen)
        return attend(rule, rows, seen, torch.zeros(stop, device=rows.positions.device), 0)


def attend_in_blocks(scale: float, positions: NDArray[np.int64], rows: QueryRows, kv: GatheredKV) -> Tensor:
    """Return the attention output of rows at ascending `positions` over K/V of all positions up to the last one.

    Rows go through PyTorch's fused kernel, which keeps no scores, a block at a time, each over the keys up to its last row's:
    chosen rows lie all over a prompt, and with all keys for all of them this took half of a recomputation on a CPU.

    Complexity: O(num_rows * num_heads * keys up to the row's block * head_dim) time.
    """
    output = torch.empty_like(rows.query)
    keys, values = (part.to(rows.query.dtype).transpose(0, 1)[None] for part in (kv.keys, kv.values))
    for start in range(0, len(positions), _BLOCK_ROWS):
        block = slice(start, start + _BLOCK_ROWS)
        stop = int(positions[block][-1]) + 1
        is_seen = kv.positions[:stop] <= rows.positions[block, None]
        query = rows.query[block].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            query, keys[:, :, :stop], values[:, :, :stop], attn_mask=is_seen, scale=scale, enable_gqa=True
        )
        output[block] = attended[0].transpose(0, 1)
    return output


class _PassDrift:
    """The runs that a pass corrects."""

    def __init__(self, drift: DriftRuns, prompt: PromptKV, rows: NDArray[np.int64]) -> None:
        device, sample, rest = prompt.slots.device, drift.sample, drift.rest
        self._correction = drift.correction
        self._rope = prompt.buffers.rope
        self._layout = RunLayout.of(drift.runs, device)
        self._rows = torch.from_numpy(np.searchsorted(rows, sample)).to(device)
        places = (prompt.buffers.place(prompt.slots[torch.from_numpy(part).to(device)]) for part in (sample, rest))
        self._sample, self._rest = places

    def correct(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Correct the tokens that stay, by the K/V of the pass's rows, which must not lie in their slots yet."""
        if layer < self._correction.first_layer:
            return
        new, reused = (keys[self._rows], values[self._rows]), self._sample.read(layer)
        corrected = self._correction.corrected(self._layout, new, reused, self._rest.read(layer), self._rope[layer])
        self._rest.write(layer, *corrected)
