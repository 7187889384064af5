"""The selection policy that settings name, and which policies an engine can run, by what it can observe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.select import SELECTION_POLICIES, FirstK, selection_policy
from kvgraft.graft.select.ratio import RatioPolicy

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.graft.select import Observable, SelectionPolicy


def available_policies(shown: Collection[Observable]) -> tuple[str, ...]:
    """Return the names of the policies that an engine can run.

    Args:
        shown: What the engine can show to a policy.
    """
    return tuple(name for name, kind in SELECTION_POLICIES.items() if kind.observes <= set(shown))


def configured_policy(name: str, *, first_k: int, recompute_ratio: float | None = None) -> SelectionPolicy:
    """Build the policy called `name` from settings, of which it takes those that are its own.

    Args:
        name: A key of `SELECTION_POLICIES`.
        first_k: Tokens per run, for `first_k`.
        recompute_ratio: Share of reused tokens, for policies that recompute a share; None for their own default.

    Raises:
        ConfigError: The name is unknown or the value is out of range.
    """
    if name == FirstK.name:
        return FirstK(first_k)
    kind = SELECTION_POLICIES.get(name)
    if kind is not None and issubclass(kind, RatioPolicy) and recompute_ratio is not None:
        return kind(ratio=recompute_ratio)
    return selection_policy(name)
