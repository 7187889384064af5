"""Factories by name: built-in ones, registered ones, and those of installed packages through entry points."""

from __future__ import annotations

import difflib
import importlib
import threading
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from kvgraft.errors import ConfigError, IntegrationError, one_line

if TYPE_CHECKING:
    from collections.abc import Mapping

Factory = TypeVar("Factory")

_TABLES: dict[str, NamedFactories[Any]] = {}
"""By group."""


class NamedFactories(Generic[Factory]):
    """A table that outsiders add to. Thread-safe.

    Attributes:
        by_name: The factories loaded so far.
    """

    def __init__(self, what: str, group: str, register: str, built_in: Mapping[str, Factory | str]) -> None:
        """Begin with those that are built in.

        Args:
            what: What the factories make, for messages: `KV store`.
            group: Entry points of installed packages.
            register: The function that outsiders call, for messages.
            built_in: By name; `module:attribute` is imported when it is asked for.
        """
        self._on_use = {name: place for name, place in built_in.items() if isinstance(place, str)}
        self.by_name: dict[str, Factory] = {
            name: factory for name, factory in built_in.items() if not isinstance(factory, str)
        }
        self._built_in = tuple(built_in)
        self._what = what
        self._group = group
        self._register = register
        self._lock = threading.Lock()
        _TABLES[group] = self

    @property
    def names(self) -> tuple[str, ...]:
        """Names that are known by now: built in, then registered or found in an installed package."""
        return tuple(dict.fromkeys((*self._built_in, *list(self.by_name))))

    @property
    def added(self) -> set[str]:
        """Names that are known by now and not built in."""
        return {*self.names} - {*self._built_in}

    def register(self, name: str, factory: Factory) -> None:
        """Make `factory` known under `name`.

        Raises:
            ConfigError: The name is empty, blank or taken.
        """
        if not name.strip():
            raise ConfigError(f"{self._what} needs a name that is not empty; choose one")
        with self._lock:
            if name in self.names:
                raise ConfigError(f"{self._what} {name!r} is registered already; choose another name")
            self.by_name[name] = factory

    def find(self, name: str) -> Factory:
        """Return the factory of that name, which is imported if it is not loaded: one of ours, or of an installed package.

        Raises:
            ConfigError: There is none; names the closest.
            IntegrationError: It cannot be imported.
        """
        if name not in self.by_name:
            # The first one wins. The lock is not held while a module is imported: that may wait for another thread's import,
            # which may look up a name here.
            factory = self._imported(name)
            with self._lock:
                self.by_name.setdefault(name, factory)
        return self.by_name[name]

    def _imported(self, name: str) -> Factory:
        if name in self._on_use:
            return cast("Factory", imported(self._what, self._on_use[name]))
        offered = {entry.name: entry for entry in entry_points(group=self._group)}
        if name not in offered:
            known = sorted({*self.names, *offered})
            closest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {closest[0]!r}?" if closest else f"known are {', '.join(known)};"
            raise ConfigError(
                f"unknown {self._what} {name!r}; {hint} Others come from {self._register} or an entry point in the group "
                f"{self._group}"
            )
        try:
            return cast("Factory", offered[name].load())
        except Exception as error:
            raise IntegrationError(
                f"{self._what} {name!r} ({offered[name].value}) cannot be loaded: {error}"
            ) from error


def imported(what: str, name: str) -> object:
    """Import what `module:attribute` names.

    Args:
        what: What it is to be, for messages: `selection policy`.
        name: Module and attribute.

    Raises:
        IntegrationError: The module cannot be imported, or has no such attribute.
    """
    module, _, attribute = name.partition(":")
    try:
        found: object = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise IntegrationError(
            f"{what} {name!r} cannot be loaded: {one_line(error)}; write module:NAME, of a module on PYTHONPATH or installed"
        ) from error
    return found


def added_names(group: str) -> set[str]:
    """Return what is known besides the built-in names of a group: what was registered, and what installed packages offer."""
    registered = _TABLES[group].added if group in _TABLES else set()
    return registered | {entry.name for entry in entry_points(group=group)}
