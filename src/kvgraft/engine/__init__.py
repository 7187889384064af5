"""The embedded engine: any transformers decoder, run with K/V reuse.

Public modules: `adapter`, `kv_space`, `request_builder`, `risk`.
"""

from __future__ import annotations

try:
    from kvgraft.engine.async_llm import AsyncLLM, EngineSnapshot
    from kvgraft.engine.llm import LLM
except ModuleNotFoundError as error:
    if error.name in {"torch", "transformers", "tokenizers", "safetensors"}:
        raise ImportError(
            f"kvgraft.engine needs {error.name}: pip install 'kvgraft[torch]'", name=error.name
        ) from error
    raise
from kvgraft.engine.request import FinishReason, Request, RequestOutput, StreamPart
from kvgraft.engine.sampling import SamplingParams, TokenLogprobs
from kvgraft.engine.scoring import Probe, Score

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineSnapshot",
    "FinishReason",
    "Probe",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StreamPart",
    "TokenLogprobs",
]
