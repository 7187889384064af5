"""Notice that the model's weights were changed in place.

vLLM calls a connector's `reset_cache` when it goes to sleep, when generation is paused with `clear_cache`, and when a caller
of `reset_prefix_cache` asks for it. It does not report weights that are loaded into a running engine through
`collective_rpc`, `update_weights` or `reload_weights`. K/V of the old ones must not be grafted then.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from kvgraft.graft.words import WORDS

if TYPE_CHECKING:
    from torch import Tensor, nn

_ELEMENTS = 16


class WeightsWitness:
    """Remembers some elements of every parameter, and the scales of 8-bit K/V, which an update does not leave as they are.

    Even a step of training in bfloat16 changes one element in ten or more: thousands of them do not all stay the same. An
    update of a few elements of a parameter may go unseen; only a digest of all of them, which a reset asks for, is a proof.
    Names are resolved anew each time, so that a parameter that is replaced is noticed too.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (module, name)
            for module in model.modules()
            for name in (*(name for name, _ in module.named_parameters(recurse=False)), *_scales(module))
        ]
        self._seen = self._look()

    def has_changed(self) -> bool:
        """Return whether weights differ from those at the last call, or at the beginning.

        Complexity: O(parameters), some elements of each, of any size (about a millisecond for 300).
        """
        seen, self._seen = self._seen, self._look()
        return seen != self._seen

    @torch.no_grad()
    def _look(self) -> tuple[bytes, ...]:
        samples = defaultdict(list)
        for module, name in self._held:
            parameter = getattr(module, name, None)
            if parameter is not None and parameter.numel():
                samples[parameter.device, parameter.dtype].append(_spread(parameter))
        return tuple(torch.cat(parts).cpu().numpy().tobytes() for parts in samples.values())


def _scales(module: nn.Module) -> tuple[str, ...]:
    """Return the buffers that scale a layer's K/V, from a checkpoint or from the first batch; vLLM has them in all layers."""
    return ("_k_scale", "_v_scale") if str(getattr(module, "kv_cache_dtype", "")).startswith("fp8") else ()


def _spread(parameter: Tensor) -> Tensor:
    """Elements from all over a parameter's storage, those at its ends among them, as integers: NaN equals itself."""
    words = parameter.view(WORDS[parameter.element_size()])
    count = min(_ELEMENTS, words.numel())
    step = max(1, (words.numel() - 1) // max(1, count - 1))
    return torch.as_strided(words, (count,), (step,))
