"""Attention of a few rows over gathered keys, with its weights, which no kernel of vLLM or SGLang returns.

Plain PyTorch in float32, one key head after the other, so that memory stays bounded for prompts of any length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvgraft.graft.sinks import kept_share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

_MAX_SCORES = 1 << 24
"""Scores (rows x query heads of one key head x keys) that are formed at once, unless one row has more: 64 MiB of float32."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionRule:
    """The attention of a layer.

    Attributes:
        scale: Factor of the scores.
        window: Keys that a row sees, its own included; 0 for all up to it.
        softcap: Bound of the scores, `softcap * tanh(score / softcap)`; 0 for none.
        sinks: (num_heads,), per head the score of one more key whose value is 0 and which every row sees; None for none.
    """

    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def first_key(self, row: int) -> int:
        """Return the first position that the row at position `row` sees."""
        return max(0, row - self.window + 1) if self.window else 0


@dataclass(frozen=True, slots=True, eq=False)
class GatheredKV:
    """K/V of int64 `(num_keys,)` positions in one layer, each `(num_keys, num_kv_heads, head_dim)`, keys rotated."""

    positions: Tensor
    keys: Tensor
    values: Tensor

    def followed_by(self, later: GatheredKV) -> GatheredKV:
        """Return both one after the other, in this one's dtype."""
        return GatheredKV(
            torch.cat([self.positions, later.positions]),
            torch.cat([self.keys, later.keys.to(self.keys.dtype)]),
            torch.cat([self.values, later.values.to(self.values.dtype)]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class QueryRows:
    """Rows that attend in one layer: int64 `(num_rows,)` positions, rotated queries `(num_rows, num_heads, head_dim)`."""

    positions: Tensor
    query: Tensor


def observe(rule: AttentionRule, rows: QueryRows, kv: GatheredKV, mass: Tensor) -> None:
    """Add the attention that rows pay to each position, summed over rows and heads.

    Args:
        rule: Of the layer.
        rows: Each row's own key must be among `kv`.
        kv: Keys and values to attend to. Those after a row, and those before its window, do not count.
        mass: float32 by position; changed in place.

    Complexity: O(num_rows * num_heads * num_keys * head_dim) time, O(num_keys * head_dim + scores formed at once) memory.
    """
    for _, _, weights in _weights(rule, rows, kv):
        mass[kv.positions] += weights.sum((0, 1))


def attend(rule: AttentionRule, rows: QueryRows, kv: GatheredKV, mass: Tensor, num_observed: int) -> Tensor:
    """Return the attention output of rows, `(num_rows, num_heads, head_dim)`; the last `num_observed` add to `mass`.

    Arguments and complexity as for `observe`.
    """
    output = torch.empty_like(rows.query)
    group = rows.query.shape[1] // kv.keys.shape[1]
    first_observed = len(rows.query) - num_observed
    for part, head, weights in _weights(rule, rows, kv):
        output[part, head * group : (head + 1) * group] = (weights @ kv.values[:, head].float()).to(output.dtype)
        observed = weights[max(0, first_observed - part.start) :]
        if len(observed):
            mass[kv.positions] += observed.sum((0, 1))
    return output


def _weights(rule: AttentionRule, rows: QueryRows, kv: GatheredKV) -> Iterator[tuple[slice, int, Tensor]]:
    """Yield a part of the rows, a key head, and float32 weights `(rows, query heads of that key head, num_keys)`."""
    num_kv_heads = kv.keys.shape[1]
    group = rows.query.shape[1] // num_kv_heads
    at_once = max(1, _MAX_SCORES // (group * len(kv.positions)))
    for start in range(0, len(rows.query), at_once):
        part = slice(start, min(start + at_once, len(rows.query)))
        own = rows.positions[part, None]
        hidden = kv.positions[None] > own
        if rule.window:
            hidden |= kv.positions[None] <= own - rule.window
        for head in range(num_kv_heads):
            query = rows.query[part, head * group : (head + 1) * group].float() * rule.scale
            scores = query @ kv.keys[:, head].float().T
            if rule.softcap:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            weights = torch.softmax(scores.masked_fill_(hidden[:, None], -math.inf), dim=-1)
            if rule.sinks is not None:
                weights *= kept_share(scores.logsumexp(-1), rule.sinks[head * group : (head + 1) * group])[..., None]
            yield part, head, weights
