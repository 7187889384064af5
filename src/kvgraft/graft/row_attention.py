"""Attention of a few rows over gathered keys, with its weights, which no kernel of vLLM or SGLang returns.

Plain PyTorch in float32, as many rows at once as bounded memory allows, for prompts of any length.
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
"""Scores (rows x query heads x keys) that are formed at once, unless one row has more: 64 MiB of float32."""


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
        rows: At ascending positions; each row's own key must be among `kv`.
        kv: Keys and values to attend to, at ascending positions. Those after a row or before its window do not count.
        mass: float32 by position; changed in place.

    Complexity: O(num_rows * num_heads * num_keys * head_dim) time, O(num_keys * head_dim + scores formed at once) memory.
    """
    for _, weights in _weights(rule, rows, kv):
        mass[kv.positions] += weights.sum((0, 1, 2))


def attend(rule: AttentionRule, rows: QueryRows, kv: GatheredKV, mass: Tensor, num_observed: int) -> Tensor:
    """Return the attention output of rows, `(num_rows, num_heads, head_dim)`; the last `num_observed` add to `mass`.

    Arguments and complexity as for `observe`.
    """
    output = torch.empty_like(rows.query)
    values = kv.values.transpose(0, 1).float()
    first_observed = len(rows.query) - num_observed
    for part, weights in _weights(rule, rows, kv):
        attended = torch.bmm(weights.flatten(1, 2), values).unflatten(1, weights.shape[1:3])
        output[part] = attended.permute(2, 0, 1, 3).flatten(1, 2).to(output.dtype)
        observed = weights[:, :, max(0, first_observed - part.start) :]
        if observed.shape[2]:
            mass[kv.positions] += observed.sum((0, 1, 2))
    return output


def _weights(rule: AttentionRule, rows: QueryRows, kv: GatheredKV) -> Iterator[tuple[slice, Tensor]]:
    """Yield a part of the rows and float32 weights `(key heads, query heads of each, rows, num_keys)`.

    All heads in one product: one after the other, over keys that were transposed for each, took 2.5 times as long on a CPU.
    """
    num_heads, num_kv_heads = rows.query.shape[1], kv.keys.shape[1]
    keys = kv.keys.permute(1, 2, 0).float()
    at_once = max(1, _MAX_SCORES // (num_heads * len(kv.positions)))
    for start in range(0, len(rows.query), at_once):
        part = slice(start, min(start + at_once, len(rows.query)))
        query = (rows.query[part].float() * rule.scale).unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        scores = torch.bmm(query.flatten(1, 2), keys).unflatten(1, query.shape[1:3])
        if rule.softcap:
            scores = torch.tanh(scores / rule.softcap).mul_(rule.softcap)
        _hide(rule, rows.positions[part], kv.positions, scores)
        weights = torch.softmax(scores, dim=-1)
        if rule.sinks is not None:
            sinks = rule.sinks.view(num_kv_heads, -1, 1)
            weights *= kept_share(scores.logsumexp(-1), sinks)[..., None]
        yield part, weights


def _hide(rule: AttentionRule, rows: Tensor, keys: Tensor, scores: Tensor) -> None:
    """Give no weight to keys after a row, nor to those before its window."""
    own = rows[:, None]
    if rule.window:
        scores.masked_fill_((keys > own) | (keys <= own - rule.window), -math.inf)
    else:  # all rows see the keys up to the first one's: few columns are left where rows stand at a prompt's end
        first = int(torch.searchsorted(keys, rows[0], right=True))
        scores[..., first:].masked_fill_(keys[first:] > own, -math.inf)
