"""Run SGLang's model over chosen rows of a prompt, outside its scheduler. The only file here that knows SGLang."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.integrations.sglang.recompute.slot_attention import SlotAttention


class RowModel(Protocol):
    """A decoder that computes rows of one prompt."""

    def run(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: SlotAttention) -> None:
        """Compute the tokens `token_ids` at positions `rows`; every layer calls `attention`.

        Raises:
            Exception: The first failure, in the model or in `attention`.
        """

    def logits(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: SlotAttention) -> Tensor:
        """Compute rows as `run` does, and return the logits (vocab_size,) after the last one, the same on all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class SGLangRows:
    """`RowModel` on the model of SGLang's model runner, whose `model` is the decoder.

    SGLang's layers ask its forward context which attention backend to call, and the context is there to be overridden for
    one forward pass. Nothing else of the batch is read by the layers of a dense decoder.
    """

    model: Any
    device: torch.device

    def run(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: SlotAttention) -> None:
        """See `RowModel`."""
        self._hidden(token_ids, rows, attention)

    @torch.inference_mode()
    def logits(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: SlotAttention) -> Tensor:
        """See `RowModel`."""
        from sglang.srt.layers.logits_processor import LogitsMetadata
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        hidden = self._hidden(token_ids, rows, attention)[-1:]
        every_row = LogitsMetadata(forward_mode=ForwardMode.DECODE)
        ids = torch.from_numpy(token_ids[-1:]).to(self.device)
        found = self.model.logits_processor(ids, hidden, self.model.lm_head, every_row)
        logits: Tensor = found.next_token_logits[0]
        return logits

    @torch.inference_mode()
    def _hidden(self, token_ids: NDArray[np.int64], rows: NDArray[np.int64], attention: SlotAttention) -> Tensor:
        """Return the decoder's output, (num_rows, width)."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        ids, positions = torch.from_numpy(token_ids).to(self.device), torch.from_numpy(rows).to(self.device)
        none = positions[:0]
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=1,
            input_ids=ids,
            req_pool_indices=none,
            seq_lens=positions[-1:] + 1,
            out_cache_loc=none,
            seq_lens_sum=int(rows[-1]) + 1,
            positions=positions,
        )
        with forward_context(ForwardContext(attn_backend=attention)):
            hidden: Tensor = self.model.model(ids, positions, batch)
        if attention.failure is not None:
            raise attention.failure
        return hidden
