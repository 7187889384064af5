"""Choice of the prefix cache of an engine: back ends by name, the default chain, and third parties through entry points.

Source: names and order of the chain follow SGLang pull request #25101.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError, IntegrationError, one_line
from kvgraft.factories import imported
from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.context import TreeCacheBuildContext
from kvgraft.prefix.radix.cache import RadixCache
from kvgraft.prefix.swa.cache import SWARadixCache

if TYPE_CHECKING:
    from kvgraft.prefix.hierarchical.transfer import TierTransfer
    from kvgraft.prefix.radix.base import TreeOptions

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "kvgraft.prefix_caches"


RadixCacheFactory = Callable[[TreeCacheBuildContext], PrefixCache]

_FACTORIES: dict[str, RadixCacheFactory] = {}
"""Not `kvgraft.factories.NamedFactories`: what is specified for this registry differs. All entry points can be registered
at once, broken ones are skipped with a warning, of several with one name the first that loads is taken, and names that
were not used yet are not listed."""


def register_radix_cache_backend(name: str, factory: RadixCacheFactory) -> None:
    """Make `factory` known under `name`.

    Raises:
        ConfigError: The name is empty, blank or taken.
    """
    if not name.strip():
        raise ConfigError("a prefix-cache backend needs a name that is not empty")
    if name in _FACTORIES:
        raise ConfigError(f"prefix-cache backend {name!r} is registered already; choose another name")
    _FACTORIES[name] = factory


def get_radix_cache_factory(name: str) -> RadixCacheFactory | None:
    """Return the factory registered under `name`, or None."""
    return _FACTORIES.get(name)


def registered_radix_cache_backends() -> list[str]:
    """Names of all registered factories, sorted."""
    return sorted(_FACTORIES)


def load_entry_points() -> None:
    """Register what installed packages offer in the group `kvgraft.prefix_caches`; names already taken are kept.

    One that cannot be loaded is warned of and skipped: a broken package must not keep others from being used.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            _register_entry_point(entry)
        except (ConfigError, IntegrationError) as error:
            logger.warning("%s; it is skipped", error)


def _register_entry_point(entry: EntryPoint) -> None:
    """Register what `entry` names unless the name is taken; raises `IntegrationError` if it is no factory."""
    if entry.name in _FACTORIES:
        return
    try:
        factory = entry.load()
    except Exception as error:
        raise IntegrationError(_broken(entry, one_line(error))) from error
    if not callable(factory):
        raise IntegrationError(_broken(entry, f"a {type(factory).__name__} is no factory"))
    register_radix_cache_backend(entry.name, factory)


def _broken(entry: EntryPoint, reason: str) -> str:
    return f"prefix-cache backend {entry.name!r} ({entry.value}) cannot be loaded: {reason}"


def create_tree_cache(context: TreeCacheBuildContext) -> PrefixCache:
    """Build the cache that `context` asks for, wrapped for streaming sessions where it does not keep them itself.

    Raises:
        ConfigError: The backend is unknown, or a setting is missing or not supported; says what to do.
        IntegrationError: The backend's entry point cannot be loaded, or what it makes is no `PrefixCache`.
    """
    cache: object = (
        _named_factory(context.backend)(context) if context.backend else default_radix_cache_factory(context)
    )
    if not isinstance(cache, PrefixCache):
        raise IntegrationError(
            f"prefix-cache backend {context.backend!r} makes a {type(cache).__name__}; its factory must return a PrefixCache"
        )
    if context.enable_streaming_session and not cache.supports_streaming_session():
        from kvgraft.prefix.standalone.sessions import StreamingSession

        cache = StreamingSession(cache)
    logger.info("prefix cache: %s, backend %s", type(cache).__name__, context.backend or "default")
    return cache


def _named_factory(name: str) -> RadixCacheFactory:
    if name not in _FACTORIES and ":" in name:
        return _imported_factory(name)
    if name not in _FACTORIES:
        _load_named(name)
    factory = _FACTORIES.get(name)
    if factory is None:
        load_entry_points()
        known = ", ".join(registered_radix_cache_backends()) or "none"
        raise ConfigError(
            f"unknown prefix-cache backend {name!r}; registered are: {known}. Call register_radix_cache_backend when your "
            f"module is imported, declare an entry point in the group {ENTRY_POINT_GROUP}, or write module:factory"
        )
    return factory


def _imported_factory(name: str) -> RadixCacheFactory:
    """Return what `module:factory` names; raises `IntegrationError` if there is none, or it is no factory."""
    factory: Any = imported("prefix-cache backend", name)
    if not callable(factory):
        raise IntegrationError(
            f"prefix-cache backend {name!r} is a {type(factory).__name__}; it must be a function that takes a "
            "TreeCacheBuildContext"
        )

    def build(context: TreeCacheBuildContext) -> PrefixCache:
        try:
            cache: PrefixCache = factory(context)
        except (ConfigError, IntegrationError):
            raise
        except Exception as error:
            raise IntegrationError(f"prefix-cache backend {name!r} cannot be built: {one_line(error)}") from error
        return cache

    return build


def _load_named(name: str) -> None:
    """Register the first entry point of that name that can be loaded; raises why if there are some and none can."""
    errors: list[IntegrationError] = []
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name != name:
            continue
        try:
            _register_entry_point(entry)
        except IntegrationError as error:
            errors.append(error)
        else:
            return
    if errors:
        raise errors[0]


def default_radix_cache_factory(context: TreeCacheBuildContext) -> PrefixCache:
    """Choose by the model and the settings; the first line that applies.

    | condition | cache |
    |---|---|
    | chunked prefill, radix cache disabled | `SWAChunkCache` for windows, else `ChunkCache` |
    | native tree asked for | refused: there is none |
    | hierarchical | `HierarchicalRadixCache`, or `HierarchicalStateCache`; refused with windows or a unified tree |
    | external service | refused: register it as a backend |
    | state-space layers | `StateRadixCache`; refused with windows or streaming sessions |
    | sliding windows | `SWARadixCache` |
    | otherwise, unified tree asked for or not | `RadixCache`, disabled if the radix cache is |

    Raises:
        ConfigError: What is asked for does not exist here, or a setting is missing.
    """
    windows = context.is_hybrid_swa or context.is_all_swa
    if context.is_hybrid_ssm and context.enable_streaming_session:
        raise ConfigError(
            "a streaming session keeps no state to go on from; unset enable_streaming_session: StateRadixCache finds the "
            "state that the last turn recorded at its end"
        )
    if context.effective_chunked_prefill_size is not None and context.disable_radix_cache:
        from kvgraft.prefix.standalone.chunk import (  # as other trees: loaded where it is chosen
            ChunkCache,
            SWAChunkCache,
        )

        if windows:
            _require_window(context)
            return SWAChunkCache(
                context.page_size,
                sliding_window_size=context.sliding_window_size,
                attention_chunk_size=context.attention_chunk_size,
            )
        return ChunkCache(context.page_size)
    _refuse_unsupported(context, windows=windows)
    if context.enable_hierarchical_cache:
        return _hierarchical_cache(context)
    if context.is_hybrid_ssm:
        from kvgraft.prefix.ssm.cache import StateRadixCache

        return StateRadixCache(context.page_size, state_chunk_size=context.state_chunk_size, **_tree_options(context))
    if windows:
        return _swa_cache(context)
    return RadixCache(context.page_size, **_tree_options(context))


def _tree_options(context: TreeCacheBuildContext) -> TreeOptions:
    return {
        "policy": context.eviction_policy,
        "policy_config": dict(context.eviction_policy_config),
        "events": context.events,
        "disabled": context.disable_radix_cache,
    }


def _refuse_unsupported(context: TreeCacheBuildContext, *, windows: bool) -> None:
    if context.use_native_tree:
        raise ConfigError("there is no tree in native code; leave use_native_tree unset for RadixCache")
    if context.is_hybrid_ssm and windows and not context.disable_radix_cache:
        raise ConfigError("no prefix cache keeps windows and states both; set disable_radix_cache")
    if context.enable_hierarchical_cache and (windows or context.use_unified_tree):
        raise ConfigError(
            "no cache of two tiers keeps windows on the host; unset enable_hierarchical_cache, or use_unified_tree if that "
            "is what asks for windows"
        )
    if context.external_backend is not None:
        raise ConfigError(
            f"no external cache service {context.external_backend!r} is built in; register_radix_cache_backend takes a "
            "factory for it"
        )


def _require_window(context: TreeCacheBuildContext) -> None:
    if context.sliding_window_size is None and context.attention_chunk_size is None:
        raise ConfigError("a model with windows needs sliding_window_size or attention_chunk_size in the build context")


def _swa_cache(context: TreeCacheBuildContext) -> PrefixCache:
    _require_window(context)
    return SWARadixCache(
        context.page_size,
        sliding_window_size=context.sliding_window_size,
        attention_chunk_size=context.attention_chunk_size,
        **_tree_options(context),
    )


def _hierarchical_cache(context: TreeCacheBuildContext) -> PrefixCache:
    if context.tier_transfer is None:
        raise ConfigError("a hierarchical cache needs tier_transfer, which moves KV between device and host")
    if context.is_hybrid_ssm:
        return _hierarchical_state_cache(context, context.tier_transfer)
    from kvgraft.prefix.hierarchical.cache import HierarchicalRadixCache

    return HierarchicalRadixCache(
        context.page_size,
        transfer=context.tier_transfer,
        write_policy=context.host_write_policy,
        **_tree_options(context),
    )


def _hierarchical_state_cache(context: TreeCacheBuildContext, transfer: TierTransfer) -> PrefixCache:
    if context.state_tier_transfer is None:
        raise ConfigError(
            "a hierarchical cache of a model with states needs state_tier_transfer, which moves states between device "
            "and host"
        )
    from kvgraft.prefix.hierarchical.states import HierarchicalStateCache

    return HierarchicalStateCache(
        context.page_size,
        transfer=transfer,
        state_transfer=context.state_tier_transfer,
        write_policy=context.host_write_policy,
        state_chunk_size=context.state_chunk_size,
        **_tree_options(context),
    )
