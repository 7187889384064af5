"""The stores that the setting `store` names; nothing of stores is imported where it names none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.config.stores import store_urls

if TYPE_CHECKING:
    from kvgraft.memory.store import KVStore


def configured_stores(setting: str) -> tuple[KVStore, ...]:
    """Open the stores of the setting, in the order in which they are asked; none for `host`. Raises as `open_stores`."""
    if not store_urls(setting):
        return ()
    from kvgraft.memory.store import open_stores

    return open_stores(setting)
