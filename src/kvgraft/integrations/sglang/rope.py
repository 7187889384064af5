"""The rotation of a loaded SGLang model's keys: read from its own modules, and checked against them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from kvgraft.errors import ModelError
from kvgraft.graft.rope import RopePairing, RopeSpec
from kvgraft.graft.rope_proof import TOLERANCE, find_rotations

if TYPE_CHECKING:
    from torch import nn

KNOWN_VARIANTS = ("RotaryEmbedding", "Llama3RotaryEmbedding")
"""Rotary classes of SGLang with angles `position * inv_freq` in prompts of any length; checked below."""

_POSITIONS = (0, 1, 2, 17, 100, 1000, 4000)


def read_rope(model: nn.Module, num_layers: int, device: torch.device) -> list[RopeSpec]:
    """Return the rotation of every attention layer, in order of layer ids.

    Raises:
        ModelError: A layer's rotation is of an unknown kind or is not what its module computes; says which.
    """
    modules = _rotary_modules(model)
    if sorted(modules) != list(range(num_layers)):
        raise ModelError(f"{len(modules)} of {num_layers} layers show how they rotate keys")
    specs: dict[int, RopeSpec] = {}
    for layer in range(num_layers):
        rotary = modules[layer]
        if id(rotary) not in specs:
            specs[id(rotary)] = _spec(rotary, device)
    return [specs[id(modules[layer])] for layer in range(num_layers)]


def _rotary_modules(model: nn.Module) -> dict[int, Any]:
    """Find the rotary module beside each attention layer."""
    found: dict[int, Any] = {}
    for parent in model.modules():
        rotary = getattr(parent, "rotary_emb", None)
        for child in parent.children():
            if type(child).__name__ == "RadixAttention" and rotary is not None:
                found[int(cast("int", child.layer_id))] = rotary
    return found


def _spec(rotary: Any, device: torch.device) -> RopeSpec:  # noqa: ANN401 - a class of SGLang
    variant = type(rotary).__name__
    if variant not in KNOWN_VARIANTS:
        raise ModelError(f"rotary variant {variant} has not been checked")
    if rotary.position_start:
        raise ModelError(f"rotary positions begin at {rotary.position_start}, not at 0")
    inv_freq = rotary._compute_inv_freq(rotary.base).to(device, torch.float32)
    pairing = RopePairing.HALF if rotary.is_neox_style else RopePairing.INTERLEAVED
    spec = RopeSpec(inv_freq, pairing)
    _check(rotary, spec)
    return spec


@torch.no_grad()
def _check(rotary: Any, spec: RopeSpec) -> None:  # noqa: ANN401 - a class of SGLang
    """Compare keys that the module rotates with keys that were moved to the same positions."""
    limit = len(rotary.cos_sin_cache)
    positions = torch.tensor([p for p in (*_POSITIONS, limit - 1) if p < limit], device=spec.inv_freq.device)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(1, rotary.head_size, generator=generator).to(spec.inv_freq.device, rotary.cos_sin_cache.dtype)
    keys = raw.expand(len(positions), -1).contiguous()
    _, rotated = rotary.forward_native(positions, keys.clone(), keys.clone())
    (found,), error = find_rotations([rotated[:, None]], positions.tolist(), [spec.inv_freq])
    is_same = found is not None and found.pairing is spec.pairing
    if not (is_same and bool(rotated.isfinite().all()) and error <= TOLERANCE.get(keys.dtype, 0.0)):
        raise ModelError(f"keys that were moved differ by {error:.1e} from keys that {type(rotary).__name__} rotates")
