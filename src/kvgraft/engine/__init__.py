"""The embedded engine: any transformers decoder, run with K/V reuse.

Rooms: `requests`, `schedule`, `kv`, `stores`, `model`, `attention`, `sampling`, `idle`.

Public modules: `inspection`, `kv.kv_space`, `memory_use`, `model.adapter`, `model.loading`, `model.tokenizer_probe`,
`requests.document_names`, `requests.donor_names`, `requests.options`, `requests.repair`, `requests.request_builder`,
`requests.risk`, `requests.text`, `requests.token_spans`, `sampling.bad_words`, `sampling.schema_rules`,
`sampling.structure`.
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
from kvgraft.engine.idle.dictated_answer import DictatedAnswer
from kvgraft.engine.idle.scoring import Probe, Score
from kvgraft.engine.requests.repair import RepairRules
from kvgraft.engine.requests.request import FinishReason, PromptFacts, Request, RequestOutput, StreamPart
from kvgraft.engine.sampling.sampling import TokenLogprobs
from kvgraft.engine.sampling.sampling_params import SamplingParams
from kvgraft.engine.sampling.structure import StructureSpec

__all__ = [
    "LLM",
    "AsyncLLM",
    "DictatedAnswer",
    "EngineSnapshot",
    "FinishReason",
    "Probe",
    "PromptFacts",
    "RepairRules",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StreamPart",
    "StructureSpec",
    "TokenLogprobs",
]
