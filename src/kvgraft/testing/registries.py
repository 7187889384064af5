"""Registries as they were: for tests that register back ends, stores and policies.

    from kvgraft.testing.registries import isolated_registries

    @pytest.fixture(autouse=True)
    def _registries():
        with isolated_registries():
            yield

in a `conftest.py` gives every test the registries that it found, without what others registered or replaced.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import TYPE_CHECKING, Any

from kvgraft.factories import NamedFactories

if TYPE_CHECKING:
    from collections.abc import Iterator

_REGISTRIES = (
    ("kvgraft.prefix.registry", "_FACTORIES"),
    ("kvgraft.prefix.eviction.policies", "EVICTION_POLICIES"),
    ("kvgraft.memory.store.registry", "_FACTORIES"),
    ("kvgraft.semantic.registry", "_FACTORIES"),
    ("kvgraft.graft.select", "_POLICIES"),
    ("kvgraft.graft.drift", "CORRECTIONS"),
)
"""Module and name of every table that a plug-in or a test can add to. Those that need torch are left out where it is not."""


@contextlib.contextmanager
def isolated_registries() -> Iterator[None]:
    """Put every registry back as it was: prefix caches, eviction policies, stores, embedders, policies, corrections.

    What is registered within is forgotten at the end, what was removed or replaced is there again. May be nested.
    """
    saved = [(table, dict(table)) for table in _tables()]
    try:
        yield
    finally:
        for table, entries in saved:
            table.clear()
            table.update(entries)


def _tables() -> Iterator[dict[str, Any]]:
    for module, name in _REGISTRIES:
        try:
            table = getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("kvgraft"):
                raise
            continue
        yield table.by_name if isinstance(table, NamedFactories) else table
