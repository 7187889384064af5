"""Hooks on vLLM's attention modules: what a layer is called with, and what becomes of a failure in between layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class LayerInputs:
    """What an attention layer is called with, each `(num_rows, its heads, head_dim)`, query and keys rotated."""

    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerInputs:  # noqa: ANN401 - vLLM's Attention
        """Bring the arguments of a call of `module` into shape."""
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        width, num_kv_heads = module.head_size, module.num_kv_heads
        return cls(
            given["query"].reshape(-1, module.num_heads, width),
            given["key"].reshape(-1, num_kv_heads, width),
            given["value"].reshape(-1, num_kv_heads, width),
        )


class KeptFailure:
    """What failed inside the model, kept until its pass is over.

    The model's own collective operations stand between its layers. So nothing is raised there: all ranks come to the end of
    the pass, and meet at the next vote (`ranks.py`).
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def safely(self, work: Callable[[], Result]) -> Result | None:
        """Do `work`, or nothing once something failed."""
        if self.error is None:
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - raised when the pass is over
                self.error = error
        return None

    def tell(self) -> None:
        """Raise what was kept, if anything."""
        if self.error is not None:
            raise self.error
