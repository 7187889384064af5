"""Find how a model's layers rotate their keys, from keys of one token that is alone at several positions.

Such a token attends only to itself, so its hidden states do not depend on its position, and each layer's key is a pure
function of token and position.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.graft.rope import RopePairing, RopeShift, RopeSpec, rotate_keys

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

SHIFTABLE_ROPE_TYPES = frozenset({"default", "linear", "llama3", "proportional", "yarn"})
"""RoPE types with frequencies that do not depend on the length of the prompt, so that a delta rotation is right."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Largest error accepted, relative to the largest magnitude. bf16 keeps 8 bits and a forward pass adds up its rounding."""


def refused_rope_parameters(parameters: dict[str, object]) -> str | None:
    """Say why keys must not be moved under a model's RoPE parameters, nested by layer type or not; None if they may."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    for part in nested or [parameters]:
        rope_type = part.get("rope_type", part.get("type", "default"))
        if rope_type not in SHIFTABLE_ROPE_TYPES:
            return (
                f"RoPE type {rope_type!r} is not supported for shifted reuse (its angles may depend on prompt length)"
            )
        if "mrope_section" in part:
            return "multimodal RoPE (M-RoPE) is not supported for shifted reuse yet"
    return None


def find_rotations(
    keys: Iterable[Tensor], positions: Sequence[int], tables: Iterable[Tensor]
) -> tuple[list[RopeSpec | None], float]:
    """Find for each layer the rotation that explains its keys best.

    Args:
        keys: Per layer `(num_positions, num_kv_heads, head_dim)`.
        positions: Of the token.
        tables: Inverse frequencies that the model may use, on the keys' device.

    Returns:
        Per layer the rotation, None for a layer that does not rotate; and the largest relative error over all layers.
    """
    candidates: list[RopeSpec | None] = [None]
    for table in tables:
        candidates += [RopeSpec(table, pairing) for pairing in RopePairing]
    specs: list[RopeSpec | None] = []
    worst = 0.0
    for layer_keys in keys:
        errors = [_rotation_error(layer_keys, positions, spec) for spec in candidates]
        best = int(np.argmin(errors))
        worst = max(worst, errors[best])
        specs.append(candidates[best])
    return specs, worst


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude of `expected`; infinite if anything is NaN."""
    difference = (actual.float() - expected.float()).abs().max()
    error = float(difference / expected.float().abs().max().clamp_min(1e-12))
    return math.inf if math.isnan(error) else error


def _rotation_error(keys: Tensor, positions: Sequence[int], spec: RopeSpec | None) -> float:
    """Return the largest relative difference between keys computed at `positions` and the first one moved there."""
    if spec is not None and spec.rotary_dim > keys.shape[-1]:
        return float("inf")
    moved = keys[:1].expand_as(keys)
    if spec is not None:
        target = torch.tensor(positions, device=keys.device)
        shift = RopeShift.between(torch.full_like(target, positions[0]), target, spec.inv_freq)
        moved = rotate_keys(moved, shift, spec.pairing)
    return relative_error(moved, keys)
