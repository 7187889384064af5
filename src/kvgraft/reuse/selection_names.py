"""The selection policies that clients may name."""

from __future__ import annotations

from functools import cache

from kvgraft.factories import added_names
from kvgraft.graft.select import SELECTION_GROUP, policy_names


def selection_names() -> list[str]:
    """Names that clients may ask for: built-in policies, registered ones, and those of installed packages.

    Packages are looked through once: it takes milliseconds, and any client can ask for a name that does not exist.
    """
    return sorted({*policy_names(), *_installed_names()})


@cache
def _installed_names() -> frozenset[str]:
    return frozenset(added_names(SELECTION_GROUP))
