"""The half of the connector beside vLLM's scheduler: decisions, no K/V. Imports without vLLM."""

from __future__ import annotations

from kvgraft.integrations.vllm.scheduler.facts import EngineFacts
from kvgraft.integrations.vllm.scheduler.graft_scheduler import GraftScheduler

__all__ = ["EngineFacts", "GraftScheduler"]
