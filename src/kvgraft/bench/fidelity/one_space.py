"""Keep all K/V of models with sliding windows while they are measured.

The engine gives K/V of window layers back as soon as no later row needs them. Trying one continuation of a prompt and
then another needs them again, and so does a donor that was read with nothing reused. A prefix cache that knows no windows
makes the engine keep them; what is computed is the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvgraft.prefix import create_tree_cache, get_radix_cache_factory, register_radix_cache_backend

if TYPE_CHECKING:
    from kvgraft.config import ServerConfig
    from kvgraft.prefix import PrefixCache, TreeCacheBuildContext

_NAME = "kvgraft-one-space"


def in_one_space(config: ServerConfig) -> ServerConfig:
    """Return `config` with that prefix cache, unless it names another."""
    if config.radix_cache_backend != "default":
        return config
    if get_radix_cache_factory(_NAME) is None:
        register_radix_cache_backend(_NAME, _without_windows)
    return config.updated({"radix_cache_backend": _NAME})


def _without_windows(context: TreeCacheBuildContext) -> PrefixCache:
    return create_tree_cache(
        replace(
            context,
            backend=None,
            sliding_window_size=None,
            attention_chunk_size=None,
            is_hybrid_swa=False,
            is_all_swa=False,
        )
    )
