"""Arguments of vLLM's attention modules in hooks, and failures in hooks, kept until the forward pass is over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class AttentionInputs:
    """Arguments of an attention layer, each `(num_rows, its heads, head_dim)`, query and keys rotated."""

    query: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionInputs:  # noqa: ANN401 - vLLM's Attention
        """Reshape the arguments of a call of `module`."""
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        width, num_kv_heads = module.head_size, module.num_kv_heads
        return cls(
            given["query"].reshape(-1, module.num_heads, width),
            given["key"].reshape(-1, num_kv_heads, width),
            given["value"].reshape(-1, num_kv_heads, width),
        )


class KeptFailure:
    """The first failure of a hook inside the model, kept until the forward pass is over.

    Nothing is raised between layers, where the model's own collective operations are: all ranks come to the end of the pass,
    and meet at the next vote (`ranks.py`).
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

    def reraise(self) -> None:
        """Raise the failure, if there was one."""
        if self.error is not None:
            raise self.error
