"""Build the parts of an engine that suit its model: one space of slots or two, and who moves K/V in them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvgraft.config import EngineConfig, quoted, variables
from kvgraft.engine.adapter import TransformersAdapter, take_over
from kvgraft.engine.cache_manager import CacheManager
from kvgraft.engine.donor_register import DonorRegister, HostDonors, SlotDonors
from kvgraft.engine.flops import ModelFlops
from kvgraft.engine.hybrid_space import HybridKVSpace
from kvgraft.engine.kv_space import KVSpace
from kvgraft.engine.sliding_windows import SlidingWindows
from kvgraft.engine.slot_plan import SlotPlan
from kvgraft.engine.windows import NoWindows, RequestWindows
from kvgraft.errors import ConfigError
from kvgraft.memory import HybridSlotPool
from kvgraft.prefix import PrefixCache, SWARadixCache, TreeCacheBuildContext, create_tree_cache
from kvgraft.reuse.lookup import Lookup
from kvgraft.reuse.registration import Registration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel


def engine_config(config: EngineConfig | None, settings: Mapping[str, object]) -> EngineConfig:
    """The settings meant by a caller: `config`, by default the environment's, with single ones changed.

    Raises:
        ConfigError: A setting is wrong, or `config` is none.
    """
    if not (config is None or isinstance(config, EngineConfig)):
        raise ConfigError(f"config is an EngineConfig or None, not {quoted(config)}")
    return (config or EngineConfig.from_dict(variables(EngineConfig))).updated(settings)


def adapter_and_prefix(model: PreTrainedModel, config: EngineConfig) -> tuple[TransformersAdapter, PrefixCache]:
    """Choose the prefix cache and allocate the slots that suit it.

    Window layers get slots of their own where the prefix cache can tell them apart, and where that saves anything.

    Raises:
        ConfigError: The prefix cache or the attention backend is unknown, or the slots do not fit into memory.
        ModelError: The model cannot be served.
    """
    layers = take_over(model)
    backend = None if config.radix_cache_backend == "default" else config.radix_cache_backend
    plan = SlotPlan.windowed(layers, model.dtype, config.num_slots, config.kv_bytes, max_running=config.max_running)
    prefix = create_tree_cache(
        TreeCacheBuildContext(
            backend=backend,
            sliding_window_size=layers.sliding_window_size,
            is_hybrid_swa=plan is not None and not layers.is_all_swa,
            is_all_swa=plan is not None and layers.is_all_swa,
        )
    )
    if not isinstance(prefix, SWARadixCache):
        plan = SlotPlan.uniform(layers, model.dtype, config.num_slots, config.kv_bytes)
    elif plan is None or prefix.sliding_window_size != layers.sliding_window_size:
        raise ConfigError(
            f"prefix-cache backend {config.radix_cache_backend!r} keeps windows of {prefix.sliding_window_size} tokens; this "
            f"model has {layers.sliding_window_size or 'none'} or too few slots: choose radix_cache_backend 'default'"
        )
    return TransformersAdapter.over(model, layers, plan, config.attention), prefix


def cache_manager(
    adapter: TransformersAdapter, prefix: PrefixCache, config: EngineConfig, refusal: str | None
) -> CacheManager:
    """Build the K/V side over the adapter's slots, with the shared rules of reuse.

    Args:
        adapter: The model and its slots.
        prefix: The prefix cache that was chosen with them.
        config: Settings.
        refusal: Why K/V of this model must not be moved, or None.

    Raises:
        ConfigError: The books of donors do not fit into memory, or there is no such store.
    """
    sizes = {"host_bytes": config.host_bytes, "donor_tokens": config.donor_tokens, "min_run": config.min_run}
    rules = partial(Registration, min_run=config.min_run, max_generation=config.max_generation)
    space: KVSpace
    windows: RequestWindows
    register: DonorRegister
    try:
        if isinstance(adapter.pool, HybridSlotPool):
            assert isinstance(prefix, SWARadixCache), "window slots are planned for a prefix cache that knows them"
            hybrid = space = HybridKVSpace(adapter.pool, prefix, store=config.store, **sizes)
            windows = sliding = SlidingWindows(hybrid)
            register = HostDonors(hybrid, rules(space.donors), sliding)
        else:
            space, windows = KVSpace(adapter.pool, prefix, store=config.store, **sizes), NoWindows()
            register = SlotDonors(space, rules(space.donors))
    except ConfigError:  # a ValueError as well; it says more than we could here
        raise
    except (MemoryError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the books of {quoted(config.donor_tokens)} donor_tokens do not fit into memory; lower donor_tokens"
        ) from error
    lookup = Lookup(space.donors, min_run=config.min_run, max_generation=config.max_generation)
    flops = ModelFlops.of_model(adapter.model)
    return CacheManager(adapter, space, windows, register, lookup, flops=flops, refusal=refusal)
