"""Attention sinks: one more key per head, with a learned score and a value of 0, that takes a share of every row's attention.

So a sink changes nothing but the denominator of the softmax. With `lse` the log of the sum over the real keys,
`exp(score) / (exp(lse) + exp(sink))` is the weight without a sink times `sigmoid(lse - sink)`. Source: gpt-oss,
https://arxiv.org/abs/2508.10925; the idea is of https://arxiv.org/abs/2309.17453.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def kept_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the share of a row's attention that real keys keep, float32: `lse` over them, `sinks` of the same head."""
    return torch.sigmoid(lse.float() - sinks.float())
