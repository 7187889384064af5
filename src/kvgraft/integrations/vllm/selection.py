"""The selection policy that the connector's settings name. Both halves build their own, the same one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.select import Observable
from kvgraft.reuse.policy import configured_policy

if TYPE_CHECKING:
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
