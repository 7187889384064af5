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

from kvgraft.graft.drift_layout import RunLayout
from kvgraft.graft.row_attention import AttentionRule, GatheredKV, QueryRows, attend

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.graft.model import DriftRuns
    from kvgraft.integrations.sglang.donors.kv_buffers import KVBuffers


@dataclass(frozen=True, slots=True, eq=False)
class PromptKV:
    """The K/V of the beginning of a prompt.

    Attributes:
        buffers: SGLang's.
        slots: int64, on the buffers' device, by position.
    """

    buffers: KVBuffers
    slots: Tensor

    def __len__(self) -> int:
        return len(self.slots)

    def gather(self, layer: int, stop: int) -> GatheredKV:
        """K/V of the positions `[0, stop)` in one layer."""
        keys, values = self.buffers.place(self.slots[:stop]).read(layer)
        return GatheredKV(torch.arange(stop, device=self.slots.device), keys, values)


class SlotAttention(ABC):
    """What SGLang's attention layers call during a pass over `rows`, ascending positions of one prompt.

    Nothing is raised inside the model, where ranks wait for one another between the layers: a failure is kept in `failure`,
    the pass goes on with zeros and writes nothing more.
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
            except Exception as error:  # noqa: BLE001 - raised by whoever runs the pass
                self.failure = error
        return torch.zeros_like(query)

    @abstractmethod
    def _attend(self, layer: int, rule: AttentionRule, rows: QueryRows, keys: Tensor, values: Tensor) -> Tensor: ...


class Look(SlotAttention):
    """Sums what rows attend to, and writes nothing: K/V behind the prompt's beginning live as long as the layer.

    Attributes:
        mass: float32 by position of the prompt, summed over the observed rows, this rank's heads, and layers.
    """

    def __init__(self, prompt: PromptKV, rows: NDArray[np.int64], num_observed: int) -> None:
        """Look through the eyes of the last `num_observed` of `rows`."""
        super().__init__(prompt, rows)
        self.mass = torch.zeros(int(rows[-1]) + 1, device=prompt.slots.device)
        self._num_observed = num_observed
        self._first_behind = int(np.searchsorted(rows, len(prompt)))

    def _attend(self, layer: int, rule: AttentionRule, rows: QueryRows, keys: Tensor, values: Tensor) -> Tensor:
        front, behind = self._prompt.gather(layer, len(self._prompt)), slice(self._first_behind, None)
        seen = GatheredKV(
            torch.cat([front.positions, rows.positions[behind]]),
            torch.cat([front.keys, keys[behind].to(front.keys.dtype)]),
            torch.cat([front.values, values[behind].to(front.values.dtype)]),
        )
        return attend(rule, rows, seen, self.mass, self._num_observed)


class Recomputation(SlotAttention):
    """Writes the K/V of rows into their slots, corrects the drift of others, and attends to both.

    All rows, and all positions that are corrected, must lie in slots of the request alone.
    """

    def __init__(self, prompt: PromptKV, rows: NDArray[np.int64], drift: DriftRuns | None) -> None:
        """Compute `rows`, all of them in the prompt's beginning; correct the runs of `drift`."""
        super().__init__(prompt, rows)
        self._own = prompt.buffers.place(prompt.slots[self._rows])
        self._stop = int(rows[-1]) + 1
        self._drift = None if drift is None else _PassDrift(drift, prompt, rows)
        self._unread = torch.zeros(self._stop, device=prompt.slots.device)

    def _attend(self, layer: int, rule: AttentionRule, rows: QueryRows, keys: Tensor, values: Tensor) -> Tensor:
        # Formed before anything is written: what the sampled tokens held is read from their slots.
        if self._drift is not None:
            self._drift.correct(layer, keys, values)
        self._own.write(layer, keys, values)
        return attend(rule, rows, self._prompt.gather(layer, self._stop), self._unread, 0)


class _PassDrift:
    """The runs that a pass corrects."""

    def __init__(self, drift: DriftRuns, prompt: PromptKV, rows: NDArray[np.int64]) -> None:
        sample = np.concatenate([run.sample for run in drift.runs])
        rest = np.concatenate([run.rest for run in drift.runs])
        device = prompt.slots.device
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
