"""The part of a store that an engine shares with engines that compute the same K/V in the same layout, and no others."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvgraft.config.setting import without_password
from kvgraft.graft.weights import named_state, weights_digest
from kvgraft.memory.store.record import space_name
from kvgraft.memory.store.registry import open_stores

if TYPE_CHECKING:
    from kvgraft.config import EngineConfig
    from kvgraft.engine.kv.kv_space import KVSpace
    from kvgraft.engine.model.adapter import TransformersAdapter
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.stores.store_tier import StoreTier
    from kvgraft.memory.store import RowLayout

logger = logging.getLogger(__name__)

_ENGINE = "kvgraft"


def row_layout(adapter: TransformersAdapter) -> RowLayout:
    """Return the layout of a token's K/V in a store."""
    from kvgraft.memory.store.layout import Field, RowLayout

    pool = adapter.pool
    fields = [Field(shape.num_kv_heads, shape.head_dim, pool.dtype) for shape in pool.layers for _ in range(2)]
    return RowLayout(tuple(fields), _rotation(adapter))


def space_of(loaded: LoadedModel, adapter: TransformersAdapter) -> str:
    """Name the part of a store by all that K/V depend on besides the text: every weight as it is now, not as it was loaded.

    Complexity: one pass over the weights.
    """
    weights = weights_digest(named_state(loaded.model))
    return space_name(loaded.fingerprint, weights, row_layout(adapter).description, _ENGINE, "rank 0 of 1")


def open_store_tier(
    config: EngineConfig, loaded: LoadedModel, adapter: TransformersAdapter, space: KVSpace, refusal: str | None
) -> StoreTier | None:
    """Open the configured stores for the engine's K/V; None if there are none, or if nothing could be reused of them.

    Args:
        config: Settings.
        loaded: The model.
        adapter: The model as it runs, after its self-check.
        space: The engine's K/V.
        refusal: Why K/V of this model must not be moved, or None.

    Raises:
        ConfigError: A store cannot be opened with these options.
        ImportError: A package is missing; names the extra.
        IntegrationError: A store of another package cannot be loaded.
    """
    stores = open_stores(config.store)
    if not stores:
        return None
    try:
        if refusal is None:
            from kvgraft.engine.stores.store_tier import StoreTier

            space.stores = StoreTier(
                stores,
                space,
                row_layout(adapter),
                space_of(loaded, adapter),
                min_run=config.min_run,
                max_generation=config.max_generation,
            )
            return space.stores
        logger.warning("store=%s is not used: %s", without_password(config.store), refusal)
    except BaseException:
        for store in stores:
            store.close()
        raise
    for store in stores:
        store.close()
    return None


def _rotation(adapter: TransformersAdapter) -> str:
    """Return how keys were rotated, by every frequency of every layer."""
    if adapter.rope is None:
        return "none"
    specs = [(layer, spec) for layer, spec in enumerate(adapter.rope) if spec is not None]
    pairings = ",".join(sorted({spec.pairing.value for _, spec in specs}))
    return f"{pairings} {weights_digest((str(layer), spec.inv_freq) for layer, spec in specs)}"
