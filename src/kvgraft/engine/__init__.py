"""The embedded engine: any transformers decoder, run with K/V reuse.

Public modules: `adapter`, `bad_words`, `document_names`, `inspection`, `kv_space`, `loading`, `memory_use`,
`request_builder`, `risk`, `structure`, `text`, `token_spans`, `tokenizer_probe`.
"""

from __future__ import annotations

try:
    from kvgraft.engine.async_llm import AsyncLLM
    from kvgraft.engine.llm import LLM
    from kvgraft.engine.snapshot import EngineSnapshot
except ModuleNotFoundError as error:
    if error.name in {"torch", "transformers", "tokenizers", "safetensors"}:
        raise ImportError(
            f"kvgraft.engine needs {error.name}: pip install 'kvgraft[torch]'", name=error.name
        ) from error
    raise
from kvgraft.engine.request import FinishReason, PromptFacts, Request, RequestOutput, StreamPart
from kvgraft.engine.sampling import TokenLogprobs
from kvgraft.engine.sampling_params import SamplingParams
from kvgraft.engine.scoring import Probe, Score
from kvgraft.engine.structure import StructureSpec

__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineSnapshot",
    "FinishReason",
    "Probe",
    "PromptFacts",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StreamPart",
    "StructureSpec",
    "TokenLogprobs",
]
