"""Build the parts of an engine that keeps prefixes in host memory, too (`prefix_host_bytes`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.engine.kv.build_context import require_room_for_a_page
from kvgraft.engine.kv.host_tier import WRITE_POLICY, state_tiers, token_tier
from kvgraft.engine.model.adapter import TransformersAdapter
from kvgraft.engine.model.slot_plan import SlotPlan
from kvgraft.errors import ConfigError
from kvgraft.memory import SlotPool
from kvgraft.prefix import HierarchicalRadixCache, HierarchicalStateCache, PrefixCache, create_tree_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvgraft.config import EngineConfig
    from kvgraft.engine.model.layers import ModelLayers
    from kvgraft.prefix import TreeCacheBuildContext


def with_host_tier(
    model: PreTrainedModel, layers: ModelLayers, plan: SlotPlan, context: TreeCacheBuildContext, config: EngineConfig
) -> tuple[TransformersAdapter, PrefixCache]:
    """Add host memory for prefixes, which copies from the device's slots: these are allocated first."""
    if context.is_hybrid_swa or context.is_all_swa:
        raise ConfigError(
            "prefix_host_bytes is for models with one space of slots, and window layers of this one have slots "
            "of their own; leave prefix_host_bytes at 0"
        )
    adapter = TransformersAdapter.over(model, layers, plan, config.attention)
    assert isinstance(adapter.pool, SlotPool), "a uniform plan makes one space"
    tier = token_tier(adapter.pool, config.prefix_host_bytes)
    prefix = create_tree_cache(
        replace(context, enable_hierarchical_cache=True, tier_transfer=tier, host_write_policy=WRITE_POLICY)
    )
    if not isinstance(prefix, HierarchicalRadixCache) or prefix.transfer is not tier:
        raise _keeps_nothing_on_host(config)
    require_room_for_a_page(prefix, plan)
    return adapter, prefix


def with_host_states(
    model: PreTrainedModel, layers: ModelLayers, plan: SlotPlan, context: TreeCacheBuildContext, config: EngineConfig
) -> tuple[TransformersAdapter, PrefixCache]:
    """The same for a model with layers that keep states, which move to host memory with their prefixes."""
    host_plan = SlotPlan.on_host(layers, model.dtype, config.prefix_host_bytes)
    adapter = TransformersAdapter.over(model, layers, plan, config.attention)
    assert isinstance(adapter.pool, SlotPool), "a plan with states makes one space"
    assert adapter.states is not None, "a plan with states makes states"
    tier, state_tier = state_tiers(adapter.pool, adapter.states, host_plan, config.prefix_host_bytes)
    prefix = create_tree_cache(
        replace(
            context,
            enable_hierarchical_cache=True,
            tier_transfer=tier,
            state_tier_transfer=state_tier,
            host_write_policy=WRITE_POLICY,
        )
    )
    if not isinstance(prefix, HierarchicalStateCache) or prefix.state_transfer is not state_tier:
        raise _keeps_nothing_on_host(config)
    require_room_for_a_page(prefix, plan)
    return adapter, prefix


def _keeps_nothing_on_host(config: EngineConfig) -> ConfigError:
    return ConfigError(
        f"prefix-cache backend {config.radix_cache_backend!r} keeps nothing in host memory; leave prefix_host_bytes "
        "at 0 or choose radix_cache_backend 'default'"
    )
