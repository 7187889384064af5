"""`truncate_prompt_tokens`: keep a part of a prompt that is too long, as vLLM does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.http.fields import Fields

Kind = TypeVar("Kind", bound="np.generic")

_SIDES = ("left", "right")
_WITHOUT = ("session_id", "echo")
"""Fields that are about all of a prompt."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """The part of a prompt that is kept.

    Attributes:
        num_tokens: At most so many tokens, special ones included; -1: as many as fit.
        keeps_end: The last ones are kept; otherwise the first.
    """

    num_tokens: int
    keeps_end: bool = True

    def cut(self, token_ids: NDArray[Kind], most: int) -> NDArray[Kind]:
        """Return what is kept of tokens `(n,)`, of which `most` fit."""
        count = most if self.num_tokens < 0 else self.num_tokens
        if len(token_ids) <= count:
            return token_ids
        return token_ids[-count:] if self.keeps_end else token_ids[:count]


def parse_truncation(fields: Fields) -> Truncation | None:
    """Read `truncate_prompt_tokens` and `truncation_side`; None if prompts are not to be cut.

    Raises:
        APIError: One of them is wrong, or the request is about all of its prompt.
    """
    side = fields.choice("truncation_side", "left", _SIDES)
    if not fields.has("truncate_prompt_tokens"):
        return None
    num_tokens = fields.integer("truncate_prompt_tokens", -1, -1, 2**31)
    if num_tokens == 0:
        raise fields.error("truncate_prompt_tokens", "must be at least 1, or -1 for as many as fit")
    for key in _WITHOUT:
        if fields.values.get(key):
            raise fields.error("truncate_prompt_tokens", f"does not go with {key}, which needs the whole prompt")
    return Truncation(num_tokens, keeps_end=side == "left")
