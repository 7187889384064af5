"""Facts about the engine for a factory of prefix caches."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError
from kvgraft.prefix import PoolFacts, TreeCacheBuildContext, make_eviction_policy
from kvgraft.windows import ChunkedWindow, SlidingWindow

if TYPE_CHECKING:
    from kvgraft.config import EngineConfig
    from kvgraft.engine.model.layers import ModelLayers
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.model.slot_plan import SlotPlan
    from kvgraft.events import EventLog
    from kvgraft.prefix import PrefixCache


def tree_cache_context(
    loaded: LoadedModel,
    layers: ModelLayers,
    config: EngineConfig,
    *,
    uniform: SlotPlan,
    windowed: SlotPlan | None,
    events: EventLog | None,
) -> TreeCacheBuildContext:
    """Fill the context.

    Args:
        loaded: The model.
        layers: Its attention layers.
        config: Settings.
        uniform: Slots of a cache with one pool.
        windowed: Slots of a cache that knows windows; None where they save nothing.
        events: Where stored and removed pages are recorded.

    Raises:
        ConfigError: A setting of the cache is wrong.
    """
    full_bytes, window_bytes = layers.bytes_per_token(loaded.model.dtype)
    pool, full_pool, swa_pool = (
        PoolFacts(
            num_slots=num_slots,
            bytes_per_token=num_bytes,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            device=str(loaded.model.device),
        )
        for num_slots, num_bytes in (
            (uniform.num_slots, full_bytes + window_bytes),
            (windowed.num_slots if windowed else 0, full_bytes),
            (windowed.num_window_slots if windowed else 0, window_bytes),
        )
    )
    return TreeCacheBuildContext(
        page_size=config.page_size,
        backend=None if config.radix_cache_backend == "default" else config.radix_cache_backend,
        model_name=loaded.name,
        model_config=loaded.model.config.get_text_config(decoder=True),
        num_layers=len(layers.shapes),
        pool=pool,
        full_pool=full_pool if windowed else None,
        swa_pool=swa_pool if windowed else None,
        effective_chunked_prefill_size=config.max_rows,
        sliding_window_size=layers.window.size if isinstance(layers.window, SlidingWindow) else None,
        attention_chunk_size=layers.window.size if isinstance(layers.window, ChunkedWindow) else None,
        is_hybrid_swa=windowed is not None and not layers.is_all_swa,
        is_all_swa=windowed is not None and layers.is_all_swa,
        is_hybrid_ssm=bool(layers.mixers),
        eviction_policy=config.eviction_policy,
        eviction_policy_config=eviction_parameters(config),
        events=events,
        options=_object(config.radix_cache_options),
    )


def eviction_parameters(config: EngineConfig) -> dict[str, int]:
    """Return the parameters of the configured eviction policy.

    Raises:
        ConfigError: It has no such parameter, or a value is out of range.
    """
    parameters = _object(config.eviction_policy_config)
    try:
        make_eviction_policy(config.eviction_policy, parameters)
    except ConfigError as error:
        raise ConfigError(f"eviction_policy_config: {error}") from error
    return parameters


def _object(text: str) -> dict[str, Any]:
    return json.loads(text) if text else {}


def require_room_for_a_page(prefix: PrefixCache, plan: SlotPlan) -> None:
    """Raise `ConfigError` if no page of the prefix cache fits into the planned slots."""
    if prefix.page_size > plan.num_slots:
        raise ConfigError(
            f"page_size={prefix.page_size} is more than the {plan.num_slots} K/V slots, so that no prefix could be kept; "
            "lower page_size or raise num_slots"
        )
