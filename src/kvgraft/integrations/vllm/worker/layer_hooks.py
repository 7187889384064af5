"""Arguments of vLLM's attention modules in hooks, and failures in hooks, kept until the forward pass is over."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

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


@contextmanager
def calls_seen(
    module: nn.Module,
    *,
    before: Callable[[Any, Any], object] = lambda args, kwargs: None,
    after: Callable[[Any, Any, Tensor], object] = lambda args, kwargs, output: None,
) -> Iterator[None]:
    """Let `before` see the arguments of each call of an attention module while the block runs, and `after` its output too.

    PyTorch's hooks do not where vLLM runs models of transformers: it calls `forward` of its attention modules.
    """
    forward, own = module.forward, vars(module).get("forward")

    def seen(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401
        before(args, kwargs)
        output: Tensor = forward(*args, **kwargs)
        after(args, kwargs, output)
        return output

    module.forward = seen
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


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
