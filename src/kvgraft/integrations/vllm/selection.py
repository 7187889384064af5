"""The selection policy that the connector's settings name. Both halves build their own, the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.select import FirstK, Observable
from kvgraft.reuse.policy import configured_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.config.vllm import VLLMConfig
    from kvgraft.graft.select import SelectionPolicy

SHOWN = frozenset({Observable.QUERY_ATTENTION, Observable.KEY_DEVIATION})
"""What a policy can observe here."""


def chosen_policy(config: VLLMConfig) -> SelectionPolicy:
    """Return the policy that settings name.

    Raises:
        ConfigError: There is none, or it has to see more than can be shown here.
        IntegrationError: It is another package's, and cannot be loaded.
    """
    return configured_policy(
        config.selection, first_k=config.first_k, recompute_ratio=config.recompute_ratio, shown=SHOWN
    )


def fallback_policy(config: VLLMConfig) -> SelectionPolicy:
    """Return the policy that observes nothing, for models whose attention cannot be formed here."""
    return FirstK(config.first_k)


def is_default(extra_config: Mapping[str, object]) -> bool:
    """Return whether the policy was left to us: only then another one may take its place."""
    return "selection" not in extra_config
