"""Keys that the rows of a layer see by the model's own word, however far they are from what a self-check can run.

A self-check on a short text cannot see a mask that begins after it. So a model is asked in one pass of one token:
transformers asks this module for its masks and gets a mark for each. What arrives at a layer's attention is that
mark, or a mask that the model has made by itself, of which nothing is known. A mark stands for transformers' rule of
who sees whom. It is compared with the kind of window that kvgraft knows the layer by, at every position where a
length of the configuration may change it.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from kvgraft.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from transformers import PretrainedConfig

    from kvgraft.windows import WindowKind

    MaskRule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_HARMLESS = frozenset({"dropout", "position_ids", "cache_position"})
"""Arguments besides flags that change nothing here: rotations are done, nothing is dropped."""
_LONGEST = 1 << 24
"""Numbers of a configuration above this are no lengths."""

_rules: ContextVar[list[MaskRule] | None] = ContextVar("kvgraft_mask_rules", default=None)


def marked_mask(*_: object, mask_function: MaskRule, device: Any = None, **__: object) -> Tensor | None:  # noqa: ANN401
    """Return no mask, which kvgraft's attention needs none of; within `marked_masks` a mark, float (1, 1, 1, 1)."""
    rules = _rules.get()
    if rules is None:
        return None
    rules.append(mask_function)
    return torch.full((1, 1, 1, 1), float(len(rules)), device=device)


@contextmanager
def marked_masks() -> Iterator[list[MaskRule]]:
    """Give marks instead of masks within; yields the rules that they stand for, the first for 1."""
    rules: list[MaskRule] = []
    token = _rules.set(rules)
    try:
        yield rules
    finally:
        _rules.reset(token)


def require_known(name: str, attention_mask: Tensor | None, arguments: Mapping[str, object]) -> None:
    """Refuse an attention that gets more than transformers' mask and the layer's window.

    Args:
        name: Of the layer's class, or the model's.
        attention_mask: What arrived at the attention outside of `marked_masks`.
        arguments: Arguments beyond those that kvgraft's attention takes.

    Raises:
        ModelError: The model masks keys by itself, or chooses them.
    """
    names = [
        name
        for name, value in arguments.items()
        if value is not None and not isinstance(value, bool) and name not in _HARMLESS
    ]
    if attention_mask is not None or names:
        how = f"gives its attention {', '.join(sorted(names))}" if names else "makes attention masks of its own"
        raise ModelError(f"{name} {how}, which kvgraft does not know; choose another model")


def require_mask(
    config: PretrainedConfig, layer: int, mask: Tensor | None, rules: list[MaskRule], window: WindowKind | None
) -> None:
    """Refuse a layer with rows that see other keys than kvgraft lets them see.

    Args:
        config: Of the decoder.
        layer: Its number.
        mask: What arrived at its attention within `marked_masks`; None if the model gives it none.
        rules: What the marks stand for.
        window: What kvgraft takes the layer for.

    Raises:
        ModelError: The mask is none of the marks, or its rule is not that of `window`.
    """
    if mask is None:
        return
    number = float(mask.reshape(-1)[0]) if mask.numel() == 1 else 0.0
    if number not in range(1, len(rules) + 1):
        require_known(f"model type {config.model_type!r}", mask, {})
    positions = _positions(config).to(mask.device)
    rows, keys = positions[:, None], positions[None, :]
    zero = torch.zeros_like(positions[0])
    seen = keys <= rows
    if window is not None:
        seen = seen & (keys >= window.first_key(rows))
    if not torch.equal(rules[int(number) - 1](zero, zero, rows, keys).expand_as(seen) & (keys <= rows), seen):
        known = "all keys up to their own" if window is None else str(window)
        raise ModelError(
            f"rows of layer {layer} of model type {config.model_type!r} do not see {known}, as kvgraft would have it; choose "
            "another model"
        )


def _positions(config: PretrainedConfig) -> Tensor:
    """Ascending int64 positions around every length that a configuration may mean, and their multiples."""
    lengths = {value for value in config.to_dict().values() if type(value) is int and 1 < value < _LONGEST}
    around = {factor * value + offset for value in lengths for factor in (1, 2, 3) for offset in (-1, 0, 1)}
    return torch.tensor(sorted({0, 1, *around}))
