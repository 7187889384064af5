"""Notice that the model's weights were changed in place.

vLLM tells a connector that caches are reset (`reset_cache`): when it goes to sleep, when generation is paused with
`clear_cache`, and when a caller of `reset_prefix_cache` asks for it. Weights that are loaded into a running engine through
`collective_rpc`, `update_weights` or `reload_weights` are told to nobody. K/V of the old ones must not be grafted then.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

_PARAMETERS = 64
_ELEMENTS = 16


class WeightsWitness:
    """Remembers some elements of some parameters, which an update of a model does not leave as they are.

    Even a step of training in bfloat16 changes one element in ten or more: a thousand of them do not all stay the same.
    Names are resolved anew each time, so that a parameter that is replaced is noticed too.
    """

    def __init__(self, model: nn.Module) -> None:
        held = [(module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)]
        self._held = random.Random(0).sample(held, min(_PARAMETERS, len(held)))
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Whether weights differ from those at the last call, or at the beginning. O(1), some hundred numbers are read."""
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    def _look(self) -> bytes:
        chosen = [
            _spread(getattr(module, name)) for module, name in self._held if getattr(module, name, None) is not None
        ]
        return torch.cat(chosen).cpu().numpy().tobytes() if chosen else b""


def _spread(parameter: Tensor) -> Tensor:
    """Bytes of elements from all over a parameter's storage."""
    tensor = parameter.detach()
    count = min(_ELEMENTS, tensor.numel())
    step = max(1, tensor.numel() // max(1, count))
    return torch.as_strided(tensor, (count,), (step,)).contiguous().view(torch.uint8)
