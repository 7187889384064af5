"""Names of models by their weights, under which K/V are kept beyond the process. Needs torch."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from kvgraft.graft.words import WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor, nn

_CHUNK = 1 << 20
_MULTIPLIER = 0x9E3779B1
"""Odd, so that exchanged elements change the weighted sum."""


def weights_digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Digest every element of a model's parameters and buffers, on any device.

    Equal weights have equal digests on every device; weights that differ in any element, by an update in place or another
    checkpoint of the same name, have different ones. A checksum against accidents, not against attackers: sums of the
    elements' bits, plain and weighted by position, per million elements.

    Args:
        tensors: Names and tensors, as `named_state` gives them.

    Returns:
        32 hexadecimal digits.

    Complexity: one pass over the weights, on their device; some seconds per gigabyte on a core (SmolLM2, 0.54 GB: 1.3 s).
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvgraft.weights")
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype};".encode())
        sums = [_sums(chunk) for chunk in _chunks(tensor)]
        if sums:
            digest.update(torch.cat(sums).cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors that a model computes with: parameters and buffers, also those that are not saved."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    words = tensor.detach().contiguous().reshape(-1).view(WORDS[tensor.element_size()])
    for start in range(0, words.numel(), _CHUNK):
        yield words[start : start + _CHUNK]


def _sums(words: Tensor) -> Tensor:
    """Return two integers, which wrap alike on all devices: the order in which one adds does not matter."""
    wide = words.to(torch.int64)
    places = torch.arange(len(wide), dtype=torch.int64, device=wide.device) * _MULTIPLIER + 1
    return torch.stack([wide.sum(), (wide * places).sum()])
