"""kvgraft in a stock vLLM: connectors that are loaded with `--kv-transfer-config` (docs/integrations/vllm.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from kvgraft.errors import IntegrationError

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.connector import GraftConnector
    from kvgraft.integrations.vllm.multi_connector import GraftMultiConnector

__all__ = ["GraftConnector", "GraftMultiConnector"]

_MODULES = {"GraftConnector": "connector", "GraftMultiConnector": "multi_connector"}

_OF_OFFLOADING = frozenset({"OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector"})
"""vLLM puts the name of one of these in the place of ours when it is started with `--kv-offloading-size`."""


def __getattr__(name: str) -> object:
    if name in _OF_OFFLOADING:
        raise IntegrationError(  # no ValueError: pydantic would put lines of its own around it
            f"{name} is not in {__name__}: vLLM's --kv-offloading-size takes the place of kvgraft's connector; leave it out "
            "(host_bytes is kvgraft's own memory), or name the store beside it in GraftMultiConnector"
        )
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{name} runs inside vLLM: install kvgraft into vLLM's environment") from error
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
