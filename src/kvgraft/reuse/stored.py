"""A donor whose K/V lie in a store alone: its handle in the catalogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.donors import Donor


@dataclass(frozen=True, slots=True)
class StoredKV:
    """Handle of a donor whose K/V lie in a store alone, under the object name `key`."""

    key: str


def is_stored(donor: Donor | None) -> bool:
    """Tell whether a donor's K/V lie in a store alone."""
    return donor is not None and isinstance(donor.kv, StoredKV)
