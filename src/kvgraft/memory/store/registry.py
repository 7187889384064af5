"""Stores of an engine besides host memory: by URL, and third parties through entry points."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol
from urllib.parse import parse_qsl

from kvgraft.config.setting import without_password
from kvgraft.config.stores import HOST, store_urls
from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.factories import NamedFactories
from kvgraft.memory.store.base import KVStore
from kvgraft.memory.store.options import refuse_options
from kvgraft.packages import require_packages

if TYPE_CHECKING:
    from collections.abc import Mapping


class StoreFactory(Protocol):
    """Opens a store that other processes may use at the same time."""

    def __call__(self, where: str, options: Mapping[str, str]) -> KVStore:
        """Open it.

        Args:
            where: What follows the name and its colon in the setting, without options.
            options: What follows the question mark: `max_bytes=20GiB&...`.

        Raises:
            ConfigError: There is no such place or option; names the remedy.
            ImportError: A package is missing; names the extra.
        """
        ...


def _file(where: str, options: Mapping[str, str]) -> KVStore:
    from kvgraft.memory.store.file import open_file_store

    return open_file_store(where, options)


def _redis(name: str, where: str, options: Mapping[str, str]) -> KVStore:
    from kvgraft.memory.store.redis_url import open_redis_store

    return open_redis_store(name, where, options)


def _mooncake(where: str, options: Mapping[str, str]) -> KVStore:
    from kvgraft.memory.store.mooncake import open_mooncake_store

    return open_mooncake_store(where, options)


_BUILT_IN: dict[str, StoreFactory] = {
    "file": _file,
    **{name: partial(_redis, name) for name in ("redis", "rediss", "valkey", "valkeys", "unix")},
    "mooncake": _mooncake,
}
_REDIS = (("redis", "xxhash"), "redis")
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    "file": (("xxhash",), "store"),
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys", "unix"), _REDIS),
    "mooncake": (("mooncake", "xxhash"), "mooncake"),
}
"""Packages of a built-in store, and the extra that installs them."""
_FACTORIES: NamedFactories[StoreFactory] = NamedFactories("KV store", "kvgraft.stores", "register_store", _BUILT_IN)


def register_store(name: str, factory: StoreFactory) -> None:
    """Make `factory` known as `NAME:...`.

    Raises:
        ConfigError: The name is empty, blank or taken.
    """
    _FACTORIES.register(name, factory)


def open_store(url: str) -> KVStore:
    """Open the store that `NAME:WHERE[?OPTION=VALUE&...]` names.

    Raises:
        ConfigError: There is no such store, or it cannot be opened with these options.
        ImportError: A package is missing; names the extra.
        IntegrationError: Its entry point cannot be imported, or what it makes is no `KVStore`.
    """
    name, colon, rest = url.partition(":")
    shown = without_password(url)
    if not colon:
        raise ConfigError(
            f"store {shown!r} says not where it is; write host, file:DIR, redis://HOST:PORT or NAME:WHERE"
        )
    where, _, query = rest.partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError:
        # The message of urllib may hold what follows a question mark in a password.
        raise ConfigError(f"options of store {shown!r} cannot be read; write NAME:WHERE?OPTION=VALUE&...") from None
    store: object = _FACTORIES.find(name)(where, options)
    if not isinstance(store, KVStore):
        raise IntegrationError(f"KV store {name!r} is a {type(store).__name__}; its factory must return a KVStore")
    return store


def require_stores(setting: str) -> None:
    """Refuse stores that cannot be opened here for want of a name or a package, before a model is loaded; opens nothing.

    Raises:
        ConfigError: There is no such store.
        ImportError: A package is missing; names the extra.
        IntegrationError: The entry point of one cannot be imported.
    """
    for url in store_urls(setting):
        name = url.partition(":")[0]
        if ":" in url and _FACTORIES.find(name) is _BUILT_IN.get(name):
            require_packages(f"store {name!r}", *_NEEDS[name])


def open_stores(setting: str) -> tuple[KVStore, ...]:
    """Open the stores of the setting `store`, joined by commas, in the order in which they are asked; none for `host`.

    Raises:
        ConfigError: One is unknown or cannot be opened, or is named twice.
        ImportError: A package is missing; names the extra.
        IntegrationError: One of another package cannot be loaded.
    """
    urls = store_urls(setting)
    if len(set(urls)) < len(urls):
        raise ConfigError(f"store={without_password(setting)!r} names a store twice; name it once")
    opened: list[KVStore] = []
    try:
        for url in urls:
            opened.append(open_store(url))  # noqa: PERF401 - those opened before a failure are closed
    except BaseException:
        for store in opened:
            store.close()
        raise
    return tuple(opened)


__all__ = ["HOST", "StoreFactory", "open_store", "open_stores", "refuse_options", "register_store", "require_stores"]
