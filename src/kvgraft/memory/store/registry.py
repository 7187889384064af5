"""Which KV store an engine gets: stores by name, and third parties through entry points."""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from typing import Protocol

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.memory.store.base import KVStore
from kvgraft.memory.store.host import HostKVStore

ENTRY_POINT_GROUP = "kvgraft.stores"


class StoreFactory(Protocol):
    """Makes an empty store that nothing else writes to. A class with this constructor is one."""

    def __call__(self, *, budget_bytes: int, pin_memory: bool) -> KVStore:
        """Make a store.

        Args:
            budget_bytes: Upper bound of `used_bytes`.
            pin_memory: Whether blocks go to a GPU, so that page-locked host memory is worth having; may be ignored.

        Raises:
            ConfigError: The store cannot be made with these settings; names the remedy.
        """
        ...


_FACTORIES: dict[str, StoreFactory] = {"host": HostKVStore}


def register_store(name: str, factory: StoreFactory) -> None:
    """Make `factory` known under `name`.

    Raises:
        ConfigError: The name is empty, blank or taken.
    """
    if not name.strip():
        raise ConfigError("a KV store needs a name that is not empty")
    if name in _FACTORIES:
        raise ConfigError(f"KV store {name!r} is registered already; choose another name")
    _FACTORIES[name] = factory


def create_store(name: str, *, budget_bytes: int, pin_memory: bool = False) -> KVStore:
    """Make the store registered under `name`, or offered under it by an installed package (group `kvgraft.stores`).

    Raises:
        ConfigError: There is no such store, or it cannot be made with these settings.
        IntegrationError: Its entry point cannot be imported, or what it makes is no `KVStore`.
    """
    store: object = _factory(name)(budget_bytes=budget_bytes, pin_memory=pin_memory)
    if not isinstance(store, KVStore):
        raise IntegrationError(f"KV store {name!r} is a {type(store).__name__}; its factory must return a KVStore")
    return store


def _factory(name: str) -> StoreFactory:
    if name not in _FACTORIES:
        _load_entry_point(name)
    return _FACTORIES[name]


def _load_entry_point(name: str) -> None:
    offered = {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in offered:
        known = sorted({*_FACTORIES, *offered})
        closest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {closest[0]!r}?" if closest else f"known are {', '.join(known)};"
        raise ConfigError(
            f"unknown store {name!r}; {hint} Others come from register_store or an entry point in the group "
            f"{ENTRY_POINT_GROUP}"
        )
    try:
        factory = offered[name].load()
    except Exception as error:
        raise IntegrationError(f"KV store {name!r} ({offered[name].value}) cannot be loaded: {error}") from error
    register_store(name, factory)
