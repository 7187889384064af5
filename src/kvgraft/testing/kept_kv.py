"""Compare the K/V that an engine keeps as exact with what its model computes: the oracle of lineage.

Stored prefixes, and donors of generation 0, are promised to be what a full prefill gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.memory import HybridSlotPool
from kvgraft.prefix import RadixKey
from kvgraft.types import Match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvgraft.engine.adapter import TransformersAdapter
    from kvgraft.engine.kv_space import KVSpace
    from kvgraft.types import DonorId, Namespace, TokenArray

TOLERANCE = 1e-4
"""Largest difference in float32, relative to the largest magnitude of the layer."""


@torch.inference_mode()
def own_kv(adapter: TransformersAdapter, token_ids: TokenArray) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (num_tokens, num_kv_heads, head_dim) per layer, by the model's own forward over a text."""
    with adapter.stock() as model:
        cache = model(torch.from_numpy(token_ids).to(model.device)[None], use_cache=True).past_key_values
    # A window layer's cache may have forgotten what it no longer sees; the last tokens are there.
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def assert_prefix_is_exact(
    adapter: TransformersAdapter, space: KVSpace, namespace: Namespace, token_ids: TokenArray
) -> int:
    """Assert that what is stored of a text's beginning is what the model computes; returns its length."""
    match = space.match(RadixKey(token_ids, namespace.key))
    length = match.prefix_len
    if not length:
        return 0
    swa = match.swa_indices if len(match.swa_indices) else np.full(length, -1)
    for layer, (keys, values) in enumerate(own_kv(adapter, token_ids[:length])):
        held = np.flatnonzero(swa >= 0) if _is_window_layer(adapter, layer) else np.arange(length)
        held = held[held >= length - len(keys)]
        stored = adapter.pool.place(match.kv_indices[held], np.maximum(swa[held], 0)).read(layer)
        offset = torch.from_numpy(held - (length - len(keys)))
        _assert_close(stored, (keys[offset], values[offset]), f"layer {layer} of a stored prefix of {length} tokens")
    return length


def assert_donors_are_exact(adapter: TransformersAdapter, space: KVSpace, texts: Sequence[TokenArray]) -> int:
    """Assert for the donors of generation 0 that are part of a text that their K/V are exact there; returns how many."""
    checked = 0
    for donor in space.donors:
        own = np.asarray(donor.token_ids, np.int64)
        text = next((text for text in texts if _stands_in(own, text, donor.start_position)), None)
        if donor.generation or text is None:
            continue
        checked += 1
        stop = donor.start_position + donor.num_tokens
        source = space.source(donor, _all_of(donor.donor_id, donor.num_tokens))
        for layer, (keys, values) in enumerate(own_kv(adapter, text[:stop])):
            held = min(len(keys), donor.num_tokens)
            stored = source.read(layer)
            _assert_close(
                (stored[0][-held:], stored[1][-held:]),
                (keys[-held:], values[-held:]),
                f"layer {layer} of donor {donor.donor_id} of generation 0 from {donor.start_position}",
            )
    return checked


def _all_of(donor_id: DonorId, num_tokens: int) -> Match:
    return Match(0, donor_id, 0, num_tokens)


def _stands_in(part: TokenArray, text: TokenArray, start: int) -> bool:
    return np.array_equal(part, text[start : start + len(part)])


def _is_window_layer(adapter: TransformersAdapter, layer: int) -> bool:
    pool = adapter.pool
    return isinstance(pool, HybridSlotPool) and pool.pool_of(layer)[0] is pool.window


def _assert_close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    for found, due in zip(actual, expected, strict=True):
        error = float((found - due).abs().max()) if len(due) else 0.0
        assert error <= TOLERANCE * float(due.abs().max().clamp_min(1e-6) if len(due) else 1.0), f"{what}: {error}"
