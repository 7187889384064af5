"""Which prefix cache an engine gets: back ends by name, the default chain, and third parties through entry points.

Source: names and order of the chain follow SGLang pull request #25101.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.prefix.base import PrefixCache
from kvgraft.prefix.chunk import ChunkCache, SWAChunkCache
from kvgraft.prefix.hierarchical.cache import HierarchicalRadixCache
from kvgraft.prefix.radix.cache import RadixCache
from kvgraft.prefix.sessions import StreamingSession
from kvgraft.prefix.swa.cache import SWARadixCache

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.prefix.events.log import EventLog
    from kvgraft.prefix.hierarchical.transfer import TierTransfer

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "kvgraft.prefix_caches"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCacheBuildContext:
    """What a factory may know. Fields that a cache does not use are ignored by it.

    Attributes:
        page_size: Tokens per page.
        backend: Name of a registered factory; None for the default chain.
        disable_radix_cache: Reuse nothing.
        effective_chunked_prefill_size: Tokens per prefill chunk, None without chunks.
        sliding_window_size: Window of a hybrid model; needed where `is_hybrid_swa`.
        is_hybrid_swa: Whether the model has full and sliding-window layers.
        is_all_swa: Whether the model has sliding-window layers only.
        is_hybrid_ssm: Whether the model has state-space layers.
        use_native_tree: Ask for a tree in native code.
        use_unified_tree: Ask for the component tree; ours serves full and sliding-window attention.
        external_backend: Cache service outside the process, such as LMCache.
        enable_hierarchical_cache: Keep evicted KV in a host tier.
        tier_transfer: Moves KV between tiers; needed where `enable_hierarchical_cache`.
        host_write_policy: `write_through` or `write_back`.
        enable_streaming_session: Keep sessions of clients that append turn by turn.
        eviction_policy: Name in `EVICTION_POLICIES`.
        eviction_policy_config: Its parameters.
        events: Where stored and removed pages are recorded.
        options: For third-party factories.
    """

    page_size: int = 1
    backend: str | None = None
    disable_radix_cache: bool = False
    effective_chunked_prefill_size: int | None = None
    sliding_window_size: int | None = None
    is_hybrid_swa: bool = False
    is_all_swa: bool = False
    is_hybrid_ssm: bool = False
    use_native_tree: bool = False
    use_unified_tree: bool = False
    external_backend: str | None = None
    enable_hierarchical_cache: bool = False
    tier_transfer: TierTransfer | None = None
    host_write_policy: str = "write_through"
    enable_streaming_session: bool = False
    eviction_policy: str = "lru"
    eviction_policy_config: Mapping[str, int] = field(default_factory=dict)
    events: EventLog | None = None
    options: Mapping[str, object] = field(default_factory=dict)


RadixCacheFactory = Callable[[TreeCacheBuildContext], PrefixCache]

_FACTORIES: dict[str, RadixCacheFactory] = {}


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

    Raises:
        IntegrationError: An entry point cannot be imported; names it.
    """
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name in _FACTORIES:
            continue
        try:
            factory = entry.load()
        except Exception as error:
            raise IntegrationError(
                f"prefix-cache backend {entry.name!r} ({entry.value}) cannot be loaded: {error}"
            ) from error
        register_radix_cache_backend(entry.name, factory)


def create_tree_cache(context: TreeCacheBuildContext) -> PrefixCache:
    """Build the cache that `context` asks for, wrapped for streaming sessions where it does not keep them itself.

    Raises:
        ConfigError: The backend is unknown, or a setting is missing or not supported; says what to do.
    """
    cache = _named_factory(context.backend)(context) if context.backend else default_radix_cache_factory(context)
    if context.enable_streaming_session and not cache.supports_streaming_session():
        cache = StreamingSession(cache)
    logger.info("prefix cache: %s, backend %s", type(cache).__name__, context.backend or "default")
    return cache


def _named_factory(name: str) -> RadixCacheFactory:
    if name not in _FACTORIES:
        load_entry_points()
    factory = _FACTORIES.get(name)
    if factory is None:
        known = ", ".join(registered_radix_cache_backends()) or "none"
        raise ConfigError(
            f"unknown prefix-cache backend {name!r}; registered are: {known}. Call register_radix_cache_backend when your "
            f"module is imported, or declare an entry point in the group {ENTRY_POINT_GROUP}"
        )
    return factory


def default_radix_cache_factory(context: TreeCacheBuildContext) -> PrefixCache:
    """Choose by the model and the settings; the first line that applies.

    | condition | cache |
    |---|---|
    | chunked prefill, radix cache disabled | `SWAChunkCache` for windows, else `ChunkCache` |
    | native tree asked for | refused: there is none |
    | unified tree asked for | `SWARadixCache` for hybrid models, else `RadixCache` |
    | hierarchical | `HierarchicalRadixCache`; refused with windows or state-space layers |
    | sliding windows | `SWARadixCache` |
    | state-space layers | refused unless disabled |
    | external service | refused: register it as a backend |
    | otherwise | `RadixCache`, disabled if the radix cache is |

    Raises:
        ConfigError: What is asked for does not exist here, or a setting is missing.
    """
    windows = context.is_hybrid_swa or context.is_all_swa
    if context.effective_chunked_prefill_size is not None and context.disable_radix_cache:
        if windows:
            return SWAChunkCache(context.page_size, sliding_window_size=_window(context))
        return ChunkCache(context.page_size)
    _refuse_unsupported(context, windows=windows)
    if windows:
        return _swa_cache(context)
    if context.enable_hierarchical_cache and not context.use_unified_tree:
        return _hierarchical_cache(context)
    return RadixCache(
        context.page_size,
        policy=context.eviction_policy,
        policy_config=dict(context.eviction_policy_config),
        events=context.events,
        disabled=context.disable_radix_cache,
    )


def _refuse_unsupported(context: TreeCacheBuildContext, *, windows: bool) -> None:
    if context.use_native_tree:
        raise ConfigError("there is no tree in native code; leave use_native_tree unset for RadixCache")
    if context.is_hybrid_ssm and not context.disable_radix_cache:
        raise ConfigError("models with state-space layers have no prefix cache here; set disable_radix_cache")
    if context.enable_hierarchical_cache and (windows or context.use_unified_tree):
        raise ConfigError(
            "HierarchicalRadixCache takes models with full attention only; unset enable_hierarchical_cache, or "
            "use_unified_tree if that is what asks for windows"
        )
    if context.external_backend is not None:
        raise ConfigError(
            f"no external cache service {context.external_backend!r} is built in; register_radix_cache_backend takes a "
            "factory for it"
        )


def _window(context: TreeCacheBuildContext) -> int:
    if context.sliding_window_size is None:
        raise ConfigError("a model with sliding windows needs sliding_window_size in the build context")
    return context.sliding_window_size


def _swa_cache(context: TreeCacheBuildContext) -> PrefixCache:
    return SWARadixCache(
        context.page_size,
        sliding_window_size=_window(context),
        policy=context.eviction_policy,
        policy_config=dict(context.eviction_policy_config),
        events=context.events,
        disabled=context.disable_radix_cache,
    )


def _hierarchical_cache(context: TreeCacheBuildContext) -> PrefixCache:
    if context.tier_transfer is None:
        raise ConfigError("a hierarchical cache needs tier_transfer, which moves KV between device and host")
    return HierarchicalRadixCache(
        context.page_size,
        transfer=context.tier_transfer,
        write_policy=context.host_write_policy,
        policy=context.eviction_policy,
        policy_config=dict(context.eviction_policy_config),
        events=context.events,
        disabled=context.disable_radix_cache,
    )
