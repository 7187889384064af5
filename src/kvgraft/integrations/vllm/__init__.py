"""kvgraft in a stock vLLM: connectors that are loaded with `--kv-transfer-config` (docs/integrations/vllm.md)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.connector import GraftConnector
    from kvgraft.integrations.vllm.multi_connector import GraftMultiConnector

__all__ = ["GraftConnector", "GraftMultiConnector"]

_MODULES = {"GraftConnector": "connector", "GraftMultiConnector": "multi_connector"}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError(f"{name} runs inside vLLM: install kvgraft into vLLM's environment") from error
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
