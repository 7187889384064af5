"""kvgraft: reuse the KV cache of text a model has already read, wherever it appears in a prompt.

`LLM`, `AsyncLLM` and `SamplingParams` are those of `kvgraft.engine`, loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.engine import LLM, AsyncLLM, SamplingParams

__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]
__version__ = "0.4.0.dev0"

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("kvgraft.engine"), name)
