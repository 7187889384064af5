"""Compare the K/V that an engine keeps as exact with what its model computes: the oracle of lineage.

Stored prefixes, and donors of generation 0, are promised to be what a full prefill gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.donors.front import front_digest
from kvgraft.fidelity import cache_of
from kvgraft.memory import HybridSlotPool
from kvgraft.prefix import RadixKey
from kvgraft.types import Match

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvgraft.donors import Donor
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.types import DonorId, Namespace, TokenArray

TOLERANCE = 1e-4
"""Largest difference in float32, relative to the largest magnitude of the layer."""


@torch.inference_mode()
def own_kv(adapter: TransformersAdapter, token_ids: TokenArray) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (num_tokens, num_kv_heads, head_dim) per layer, by the model's own forward over a text."""
    with adapter.stock() as model:
        cache = cache_of(model(torch.from_numpy(token_ids).to(model.device)[None], use_cache=True))
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


def assert_slots_are_exact(adapter: TransformersAdapter, slots: NDArray[np.int64], token_ids: TokenArray) -> None:
    """Assert that the first slots of a request hold what the model computes of a text's beginning.

    Args:
        adapter: The model; all its layers share one space of slots.
        slots: Slot of each position, maybe of more than the text has.
        token_ids: The text.
    """
    if not len(token_ids):
        return
    for layer, computed in enumerate(own_kv(adapter, token_ids)):
        stored = adapter.pool.place(slots[: len(token_ids)]).read(layer)
        _assert_close(stored, computed, f"layer {layer} before position {len(token_ids)}")


def assert_donors_are_exact(
    adapter: TransformersAdapter, space: KVSpace, texts: Sequence[TokenArray], *, last: int | None = None
) -> int:
    """Assert for the donors of generation 0 that are part of a text that their K/V are exact there; returns how many.

    It must be exact after the text that its `front` names. One without a `front` must be exact in one of
    the texts that have its tokens at its position, so `texts` are all that were ever asked for.

    Args:
        adapter: The model.
        space: What it keeps.
        texts: Prompts and answers.
        last: Donors are looked at that stand in one of so many last texts; None for all.
    """
    checked = 0
    for donor in space.donors:
        own, stop = np.asarray(donor.token_ids, np.int64), donor.start_position + donor.num_tokens
        if donor.generation or not any(
            _stands_in(own, text, donor.start_position) for text in texts[-last if last else 0 :]
        ):
            continue
        checked += 1
        fronts = {
            text[:stop].tobytes(): text[:stop]
            for text in texts
            if _stands_in(own, text, donor.start_position) and _has_front_of(donor, text)
        }
        source = space.source(donor, _all_of(donor.donor_id, donor.num_tokens))
        stored = [source.read(layer) for layer in range(adapter.num_layers)]
        problems = [_first_difference(stored, own_kv(adapter, front)) for front in fronts.values()]
        assert "" in problems, f"donor {donor.donor_id} of generation 0 from {donor.start_position}: {problems}"
    return checked


def _first_difference(stored: Sequence[tuple[Tensor, Tensor]], computed: Sequence[tuple[Tensor, Tensor]]) -> str:
    """Name the first layer of which the last tokens differ; empty if none does."""
    for layer, ((keys, values), (own_keys, own_values)) in enumerate(zip(stored, computed, strict=True)):
        held = min(len(own_keys), len(keys))
        for found, due in ((keys[-held:], own_keys[-held:]), (values[-held:], own_values[-held:])):
            error = _excess(found, due)
            if error:
                return f"layer {layer}: {error}"
    return ""


def _all_of(donor_id: DonorId, num_tokens: int) -> Match:
    return Match(0, donor_id, 0, num_tokens)


def _stands_in(part: TokenArray, text: TokenArray, start: int) -> bool:
    return np.array_equal(part, text[start : start + len(part)])


def _has_front_of(donor: Donor, text: TokenArray) -> bool:
    return not donor.front or donor.front == front_digest(donor.namespace.key, text[: donor.start_position])


def _is_window_layer(adapter: TransformersAdapter, layer: int) -> bool:
    pool = adapter.pool
    return isinstance(pool, HybridSlotPool) and pool.pool_of(layer)[0] is pool.window


def _assert_close(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], what: str) -> None:
    for found, due in zip(actual, expected, strict=True):
        error = _excess(found, due)
        assert not error, f"{what}: {error}"


def _excess(found: Tensor, due: Tensor) -> float:
    """Largest difference if it is larger than rounding explains, else 0."""
    if not len(due):
        return 0.0
    error = float((found - due).abs().max())
    return 0.0 if error <= TOLERANCE * float(due.abs().max().clamp_min(1e-6)) else error
