"""The selection policy that settings name, and which policies an engine can run, by what it can observe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError
from kvgraft.graft.select import FirstK, Observable, policy_class, policy_names, selection_policy
from kvgraft.graft.select.ratio import RatioPolicy

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvgraft.graft.select import SelectionPolicy


def available_policies(shown: Collection[Observable]) -> tuple[str, ...]:
    """Return the names of the policies that an engine can run.

    Args:
        shown: What the engine can show to a policy.
    """
    return tuple(name for name in policy_names() if policy_class(name).observes <= set(shown))


def configured_policy(
    name: str,
    *,
    first_k: int,
    recompute_ratio: float | None = None,
    shown: Collection[Observable] = frozenset(Observable),
    may_import: bool = True,
) -> SelectionPolicy:
    """Build the policy called `name` from settings, of which it takes those that are its own.

    Args:
        name: Of a built-in or registered policy, one of an installed package, or `module:Class`.
        first_k: Tokens per run, for `first_k`.
        recompute_ratio: Share of reused tokens, for policies that recompute a share; None for their own default.
        shown: What the engine can show to a policy.
        may_import: Whether `module:Class` is known; False for what a client says.

    Raises:
        ConfigError: The name is unknown, the value is out of range, or the policy has to see what the engine does not show.
        IntegrationError: A policy of another package cannot be loaded or built, or says nonsense of itself.
    """
    if name == FirstK.name:
        return FirstK(first_k)
    takes_share = issubclass(policy_class(name, may_import=may_import), RatioPolicy)
    own = {"ratio": recompute_ratio} if takes_share and recompute_ratio is not None else {}
    policy = selection_policy(name, may_import=may_import, **own)
    unseen = policy.observes - set(shown)
    if unseen:
        raise ConfigError(
            f"selection policy {name!r} has to see {', '.join(sorted(unseen))}, which this engine does not show; choose "
            f"{', '.join(available_policies(shown))}"
        )
    return policy
