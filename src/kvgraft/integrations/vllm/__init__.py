"""kvgraft in a stock vLLM: `GraftConnector`, loaded with `--kv-transfer-config` (docs/integrations/vllm.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.integrations.vllm.connector import GraftConnector

__all__ = ["GraftConnector"]


def __getattr__(name: str) -> object:
    if name != "GraftConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import vllm  # noqa: F401
    except ImportError as error:
        raise ImportError("GraftConnector runs inside vLLM: install kvgraft into vLLM's environment") from error
    from kvgraft.integrations.vllm.connector import GraftConnector

    return GraftConnector
