"""Build the parts of an engine that suit its model: slots of tokens, of windows or of states, and their managers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvgraft.config import EngineConfig, quoted, variables
from kvgraft.engine.kv.build_context import require_room_for_a_page, tree_cache_context
from kvgraft.engine.kv.cache_manager import CacheManager
from kvgraft.engine.kv.kv_space import KVSpace
from kvgraft.engine.kv.layer_slots import LayerSlots
from kvgraft.engine.kv.planning import Planner
from kvgraft.engine.kv.request_donors import NoDonors, RequestDonors, SlotDonors
from kvgraft.engine.model.adapter import TransformersAdapter, take_over
from kvgraft.engine.model.flops import ModelFlops
from kvgraft.engine.model.slot_plan import SlotPlan, running_states
from kvgraft.errors import ConfigError
from kvgraft.memory import SlotPool
from kvgraft.prefix import PrefixCache, SWARadixCache, create_tree_cache
from kvgraft.reuse.donor_rules import DonorRules
from kvgraft.reuse.lookup import Lookup

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.engine.kv.host_tier import HostTier
    from kvgraft.engine.model.layers import ModelLayers
    from kvgraft.engine.model.loading import LoadedModel
    from kvgraft.engine.requests.risk import HeldRisk
    from kvgraft.events import EventLog
    from kvgraft.reuse.substitute import Substitutes
    from kvgraft.semantic import DonorProposer


def engine_config(config: EngineConfig | None, settings: Mapping[str, object]) -> EngineConfig:
    """The settings meant by a caller: `config`, by default the environment's, with single ones changed.

    Raises:
        ConfigError: A setting is wrong, or `config` is none.
    """
    if not (config is None or isinstance(config, EngineConfig)):
        raise ConfigError(f"config is an EngineConfig or None, not {quoted(config)}")
    return (config or EngineConfig.from_dict(variables(EngineConfig))).updated(settings)


def adapter_and_prefix(
    loaded: LoadedModel, config: EngineConfig, events: EventLog | None = None
) -> tuple[TransformersAdapter, PrefixCache]:
    """Choose the prefix cache and allocate the slots that suit it.

    Window layers get slots of their own where the prefix cache distinguishes them, and where that saves anything.

    Args:
        loaded: The model, which is taken over.
        config: Settings.
        events: Log of what the prefix cache stores and removes; None for none.

    Raises:
        ConfigError: The prefix cache or the attention backend is unknown, a setting of the prefix cache is wrong, or the
            slots do not fit into memory.
        IntegrationError: Another package's prefix cache cannot be loaded, or is none.
        ModelError: The model cannot be served.
    """
    model = loaded.model
    layers = take_over(model)
    if layers.mixers:
        return _with_states(loaded, layers, config, events)
    sizes = (layers, model.dtype, config.num_slots, config.kv_bytes)
    uniform = SlotPlan.uniform(*sizes)
    windowed = partial(SlotPlan.windowed, *sizes, max_running=config.max_running, ratio=config.hybrid_kvcache_ratio)
    planned = windowed(page_size=config.page_size)
    context = tree_cache_context(loaded, layers, config, uniform=uniform, windowed=planned, events=events)
    if config.prefix_host_bytes:
        from kvgraft.engine.host_assembly import with_host_tier  # loaded where it is asked for

        return with_host_tier(model, layers, uniform, context, config)
    prefix = create_tree_cache(context)
    plan = windowed(page_size=prefix.page_size) if isinstance(prefix, SWARadixCache) else uniform
    if isinstance(prefix, SWARadixCache) and (plan is None or prefix.window != layers.window):
        raise ConfigError(
            f"prefix-cache backend {config.radix_cache_backend!r} keeps {prefix.window}; this model has "
            f"{layers.window or 'none'} or too few slots: choose radix_cache_backend 'default'"
        )
    assert plan is not None
    require_room_for_a_page(prefix, plan)
    return TransformersAdapter.over(model, layers, plan, config.attention), prefix


def _with_states(
    loaded: LoadedModel, layers: ModelLayers, config: EngineConfig, events: EventLog | None
) -> tuple[TransformersAdapter, PrefixCache]:
    """Allocate states besides, which only a prefix cache that records them can keep for others.

    Window layers, if there are any, share the slots of tokens with the others.
    """
    model = loaded.model
    sizes = (layers, model.dtype, config.num_slots, config.kv_bytes)
    plan = SlotPlan.with_states(*sizes, max_running=config.max_running)
    context = tree_cache_context(loaded, layers, config, uniform=plan, windowed=None, events=events)
    if config.prefix_host_bytes:
        from kvgraft.engine.host_assembly import with_host_states  # loaded where it is asked for

        return with_host_states(model, layers, plan, context, config)
    from kvgraft.prefix import StateRadixCache  # loaded for models that keep a state

    prefix = create_tree_cache(context)
    if not isinstance(prefix, StateRadixCache):
        raise ConfigError(
            f"prefix-cache backend {config.radix_cache_backend!r} records no states, which layers of this model "
            "keep; choose radix_cache_backend 'default'"
        )
    require_room_for_a_page(prefix, plan)
    return TransformersAdapter.over(model, layers, plan, config.attention), prefix


def donor_proposer(config: EngineConfig, tokenizer: object) -> DonorProposer | None:
    """Make what proposes donors by resemblance, or None.

    Raises:
        ConfigError: There is no such embedder, or it lacks weights or a tokenizer.
        ImportError: A package that it needs is missing.
    """
    if config.embedder == "none":
        return None
    from kvgraft.semantic import Discovery, DonorProposer, create_embedder, decoder_of  # loaded where it is asked for

    return DonorProposer(Discovery(create_embedder(config.embedder, decoder_of(tokenizer))))


def cache_manager(
    adapter: TransformersAdapter,
    prefix: PrefixCache,
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    refusal: str | None,
    risk: HeldRisk,
    proposer: DonorProposer | None = None,
) -> CacheManager:
    """Build the K/V side over the adapter's slots, with the shared rules of reuse.

    Args:
        adapter: The model and its slots.
        prefix: The prefix cache that was chosen with them.
        config: Settings.
        loaded: The model as loaded, for a semantic provider.
        refusal: Why K/V of this model must not be moved, or None.
        risk: Notches at which grafts are served.
        proposer: Names donors that resemble a prompt; watches the catalogue.

    Raises:
        ConfigError: The books of donors do not fit into memory, or there is no such store or semantic provider.
    """
    tier, state_tier = _tiers(prefix, config)
    layers: LayerSlots
    request_donors: RequestDonors
    try:
        space = KVSpace(
            adapter.pool,
            prefix,
            host_bytes=config.host_bytes,
            donor_tokens=config.donor_tokens,
            min_run=config.min_run,
            tier=tier,
        )
        rules = DonorRules(space.donors, min_run=config.min_run, max_generation=config.max_generation)
        if not isinstance(adapter.pool, SlotPool):
            from kvgraft.engine.kv.host_donors import HostDonors  # loaded for models with windows
            from kvgraft.engine.kv.sliding_windows import SlidingWindows

            layers = windows = SlidingWindows(space, adapter.pool)
            request_donors = HostDonors(space, rules, windows)
        elif adapter.states is not None:
            from kvgraft.engine.kv.running_states import RunningStates  # loaded for models that keep a state
            from kvgraft.prefix import BranchingPoints

            most_running = running_states(adapter.states.num_states, config.max_running)
            layers = RunningStates(space, adapter.states, BranchingPoints(), max_running=most_running, tier=state_tier)
            request_donors = NoDonors(space, rules)
        else:
            layers, request_donors = LayerSlots(space), SlotDonors(space, rules)
    except ConfigError:  # a ValueError as well; it says more than we could here
        raise
    except (MemoryError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"the books of {quoted(config.donor_tokens)} donor_tokens do not fit into memory; lower donor_tokens"
        ) from error
    if proposer is not None:
        space.donors.watch(proposer)
    lookup = Lookup(
        space.donors,
        min_run=config.min_run,
        max_generation=config.max_generation,
        proposer=proposer,
    )
    flops = ModelFlops.of_model(adapter.model, adapter.layers)
    if config.semantic_provider and not isinstance(adapter.pool, SlotPool):
        raise ConfigError("semantic_provider does not go with sliding windows, which keep no whole text; unset it")
    substitutes = _substitutes(config, loaded)
    planner = Planner(space, flops, lookup, risk, refusal=refusal, substitutes=substitutes)
    return CacheManager(adapter, space, layers, request_donors, planner)


def _substitutes(config: EngineConfig, loaded: LoadedModel) -> Substitutes | None:
    """Return the provider of other texts that settings name; nothing of it is imported where they name none."""
    if not config.semantic_provider:
        return None
    from kvgraft.reuse.substitute import Substitutes

    return Substitutes.configured(config, loaded)


def _tiers(prefix: PrefixCache, config: EngineConfig) -> tuple[HostTier | None, HostTier | None]:
    """Return the host memory of K/V and of states that the prefix cache was made with; nothing of it is imported without."""
    if not config.prefix_host_bytes:
        return None, None
    from kvgraft.engine.kv.host_tier import tiers_of

    return tiers_of(prefix)
