"""Patches for the K/V of a passage: what is true less what is copied, cut to a mean or a rank. Tensors only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RANKS = (1, 2, 4, 8)
_SMALLEST = 1e-6
"""Share of the longest direction of queries below which one counts as none."""


@dataclass(frozen=True, slots=True, eq=False)
class PassageKV:
    """K/V of a passage, each float32 (num_layers, length, num_kv_heads, head_dim), keys turned to position 0."""

    keys: Tensor
    values: Tensor

    def __add__(self, other: PassageKV) -> PassageKV:
        """Add both."""
        return PassageKV(self.keys + other.keys, self.values + other.values)

    def __sub__(self, other: PassageKV) -> PassageKV:
        """Subtract both."""
        return PassageKV(self.keys - other.keys, self.values - other.values)

    def only_keys(self) -> PassageKV:
        """Return zeros for values."""
        return replace(self, values=torch.zeros_like(self.values))


def mean(difference: Tensor) -> Tensor:
    """Return the mean over tokens, for every token; shapes as in `PassageKV`."""
    return difference.mean(1, keepdim=True).expand_as(difference).contiguous()


def low_rank(difference: Tensor, ranks: Sequence[int]) -> list[Tensor]:
    """Return the nearest differences of these ranks per layer and head. Source: Eckart and Young, 1936."""
    by_head = difference.transpose(1, 2).double()
    axes = torch.linalg.eigh(by_head.mT @ by_head).eigenvectors
    return [(by_head @ axes[..., -rank:] @ axes[..., -rank:].mT).transpose(1, 2).float() for rank in ranks]


def cuts(difference: PassageKV) -> dict[str, PassageKV]:
    """Return every cut of a difference, by the name of the patch."""
    keys, values = (low_rank(part, RANKS) for part in (difference.keys, difference.values))
    low = {f"rank {rank}": PassageKV(*parts) for rank, *parts in zip(RANKS, keys, values, strict=True)}
    return {"mean": PassageKV(mean(difference.keys), mean(difference.values))} | low


def score_patch(difference: Tensor, queries: Tensor) -> Tensor:
    """Return the key patch of rank 1 that leaves the least error of the scores of `queries`, squared and summed.

    Args:
        difference: True less copied keys at their positions, (num_layers, length, num_kv_heads, head_dim).
        queries: At theirs, (num_layers, num_kv_heads, n, head_dim).
    """
    by_head, asked = difference.transpose(1, 2).double(), queries.double()
    found, axes = torch.linalg.eigh(asked.mT @ asked)
    size = found.clamp(min=0).sqrt()
    is_known = size > _SMALLEST * size[..., -1:]
    inverse = torch.where(is_known, 1 / size.clamp(min=torch.finfo(size.dtype).tiny), 0)
    weighed = by_head @ (axes * size[..., None, :])
    best = torch.linalg.eigh(weighed.mT @ weighed).eigenvectors[..., -1:]
    return (weighed @ best @ best.mT @ (axes * inverse[..., None, :]).mT).transpose(1, 2).float()


def total_patch(true: Tensor, copied: Tensor, queries: Tensor, scale: float) -> Tensor:
    """Return one vector per layer and head for all keys: every query head's mean total score becomes the true one.

    Args:
        true: Keys at their positions, as `copied`.
        copied: (num_layers, length, num_kv_heads, head_dim).
        queries: By query head of a K/V head, (num_layers, num_kv_heads, group, n, head_dim).
        scale: Of scores.
    """

    def totals(keys: Tensor) -> Tensor:
        return (scale * queries.double() @ keys.transpose(1, 2).double()[:, :, None].mT).logsumexp(-1).mean(-1)

    gap = (totals(true) - totals(copied)) / scale
    patch = torch.linalg.pinv(queries.double().mean(3)) @ gap[..., None]
    return patch.squeeze(-1)[:, None].expand_as(copied).float().contiguous()


@dataclass(frozen=True, slots=True)
class Agreement:
    """Differences behind a prompt and behind a front, over all passages, layers, and heads, keys or values.

    Attributes:
        cosine: Between the two.
        explained: By cut, the share of the learned difference's energy that is kept.
        left: By cut, the energy that the patch leaves of the true difference, as a share; above 1 it does harm.
    """

    cosine: float
    explained: dict[str, float]
    left: dict[str, float]

    @classmethod
    def of(
        cls, true: Sequence[Tensor], learned: Sequence[Tensor], patches: Mapping[str, Sequence[Tensor]]
    ) -> Agreement:
        """Compare passage by passage; patches are cuts of what was learned."""
        product = sum(float((ours * theirs).sum()) for ours, theirs in zip(true, learned, strict=True))
        ours, theirs = energy(true), energy(learned)
        return cls(
            product / (ours * theirs) ** 0.5,
            {name: energy(cut) / theirs for name, cut in patches.items()},
            {name: energy([a - b for a, b in zip(true, cut, strict=True)]) / ours for name, cut in patches.items()},
        )


def energy(parts: Sequence[Tensor]) -> float:
    """Return the sum of squares."""
    return sum(float(part.square().sum()) for part in parts)
