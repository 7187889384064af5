"""Whether the first token of an answer may be drawn from plain copies, before the policy's choice is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def reason_if_unsure(logits: Tensor, below_margin: float) -> str:
    """Return why the first token of an answer waits for the repair, empty if it may be drawn from `logits` (vocab_size,).

    Where its probability exceeds the next one's by less than `below_margin`, the error of plain copies may be what decides
    between the two. Both are those of the model, before temperature, penalties and masks.
    """
    if not below_margin:
        return ""
    first, second = logits.float().softmax(-1).topk(2).values.tolist()
    if first - second >= below_margin:
        return ""
    return f"the first token was likelier than the next one by {first - second:.3f} only"
