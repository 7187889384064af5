"""The embedded engine: any transformers decoder, run with K/V reuse."""

from __future__ import annotations

try:
    from kvgraft.engine.llm import LLM, StreamPart
except ModuleNotFoundError as error:
    if error.name in {"torch", "transformers", "tokenizers", "safetensors"}:
        raise ImportError(
            f"kvgraft.engine needs {error.name}: pip install 'kvgraft[torch]'", name=error.name
        ) from error
    raise
from kvgraft.engine.request import FinishReason, RequestOutput
from kvgraft.engine.sampling import SamplingParams
from kvgraft.engine.scoring import Score

__all__ = ["LLM", "FinishReason", "RequestOutput", "SamplingParams", "Score", "StreamPart"]
