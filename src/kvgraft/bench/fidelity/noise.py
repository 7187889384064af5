"""The noise floor: what rounding to another number format does to the same model, with nothing reused."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from kvgraft.bench.fidelity.subject import stock_attention
from kvgraft.fidelity import divergence, stock_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgraft.bench.fidelity.measure import PreparedRequest
    from kvgraft.engine import LLM
    from kvgraft.fidelity import Divergence


class NoiseFloor:
    """A second copy of the model: bfloat16 beside float32, and float32 beside everything else. Made when first used."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._other: PreTrainedModel | None = None
        own = next(llm.adapter.model.parameters()).dtype
        self.dtype = torch.bfloat16 if own is torch.float32 else torch.float32

    @property
    def name(self) -> str:
        """Name of the other format."""
        return str(self.dtype).removeprefix("torch.")

    def measure(self, asked: PreparedRequest) -> Divergence:
        """Compare full prefill of both, KL(as measured || other)."""
        with self._llm.adapter.stock(stock_attention(self._llm)) as model:
            other = stock_logits(self.other(model), asked.prompt, asked.reference.token_ids)
        return divergence(asked.reference.logits, other)

    def other(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the copy of `model` with stock attention; the same one every time."""
        if self._other is None:
            self._other = copy.deepcopy(model)
            torch.nn.Module.to(self._other, self.dtype)
        return self._other
