"""Get hold of the model that vLLM runs.

Connectors are not given the model. vLLM's own seams are a plugin that wraps the runner's `load_model`, a worker extension
class (a further flag for the user) or a walk over stack frames. PyTorch has a public one that needs nothing of vLLM: a
forward pre-hook for all modules. It fires for the outermost module first, which is the model, and is removed at once, so
that compiled code and later passes never see it. No text can be reused before a first pass has computed it, so the
first pass is early enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from torch import nn


class ModelHandle:
    """Waits for the first forward pass of the model that contains a layer of ours."""

    def __init__(self, own_layer: nn.Module) -> None:
        self.model: nn.Module | None = None
        self._own_layer = own_layer
        self._hook = register_module_forward_pre_hook(self._seen)

    def close(self) -> None:
        """Stop waiting."""
        self._hook.remove()

    def _seen(self, module: nn.Module, _args: Any) -> None:  # noqa: ANN401 - PyTorch's signature
        # Samplers and encoders run too, and another engine of the process may: the model is what holds our layer.
        if hasattr(module, "compute_logits") and any(part is self._own_layer for part in module.modules()):
            self.model = module
            self.close()
