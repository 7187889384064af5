"""The selection policy that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.graft.select import SelectionPolicy, selection_policy

if TYPE_CHECKING:
    from kvgraft.config.vllm import VLLMConfig


def policy_of(config: VLLMConfig) -> SelectionPolicy:
    """Build it."""
    parameters: dict[str, dict[str, float]] = {
        "first_k": {"k": config.first_k},
        "kv_deviation": {"ratio": config.recompute_ratio},
    }
    return selection_policy(config.selection, **parameters.get(config.selection, {}))
