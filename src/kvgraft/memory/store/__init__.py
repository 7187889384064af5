"""Stores of donors that processes share and that outlive them, one file per medium; `tier` is how an engine uses them.

Public modules: `checksums`, `file`, `inspection`, `layout`, `options`, `record`, `registry`, `tier`.
`RowLayout` needs torch, the rest does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.memory.store.base import KVStore
from kvgraft.memory.store.registry import HOST, StoreFactory, open_store, open_stores, register_store

if TYPE_CHECKING:
    from kvgraft.memory.store.layout import RowLayout

__all__ = ["HOST", "KVStore", "RowLayout", "StoreFactory", "open_store", "open_stores", "register_store"]


def __getattr__(name: str) -> object:
    """Import what needs torch when it is first asked for."""
    if name != "RowLayout":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvgraft.memory.store.layout import RowLayout

    return RowLayout
