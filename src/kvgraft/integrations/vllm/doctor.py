"""Findings of `kvgraft doctor --engine vllm`: versions, and with a model the proofs of the connector on a real engine."""

from __future__ import annotations

import os
import platform
import random

from kvgraft import __version__
from kvgraft.integrations.versions import installed
from kvgraft.integrations.vllm.versions import TESTED_VERSIONS, installed_versions, untested

_PROMPT_TOKENS = 96


def diagnose(model: str | None = None) -> dict[str, object]:
    """Return findings in the order in which they should be read.

    `shifted_reuse` is `accepted`, `refused: ` and a reason, or `unknown: ` and what to do.

    Args:
        model: Directory or hub id of a model; an engine is started with it, in this process. None looks at versions alone.
    """
    found = installed_versions()
    findings: dict[str, object] = {
        "kvgraft": __version__,
        "python": platform.python_version(),
        "torch": installed("torch") or "not installed",
        "vllm": ", ".join(f"{name} {number}" for name, number in found.items()) or "not installed",
        "tested_with": ", ".join(f"vLLM {number}" for number in TESTED_VERSIONS),
    }
    if not found:
        return {**findings, "shifted_reuse": "refused: vLLM is not installed in this environment"}
    warning = untested(found)
    if warning:
        findings["warning"] = warning
    if model is None:
        return {**findings, "shifted_reuse": "unknown: pass --model to check a model on a real engine"}
    return {**findings, **_on_an_engine(model)}


def _on_an_engine(model: str) -> dict[str, object]:
    """Start an engine with the connector, read one prompt, and ask both halves."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # both halves in this process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    llm = LLM(
        model=model,
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=2,
        kv_transfer_config=KVTransferConfig(
            kv_connector="GraftConnector", kv_connector_module_path="kvgraft.integrations.vllm", kv_role="kv_both"
        ),
    )
    try:
        vocabulary = llm.llm_engine.model_config.get_vocab_size()
        prompt = random.Random(0).choices(range(min(3, vocabulary - 1), vocabulary), k=_PROMPT_TOKENS)
        llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
        connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
        worker = get_kv_transfer_group().worker
        refusal = connector.scheduler.refusal or worker.refusal
        return {
            "model": model,
            **worker.description,
            "donors_after_one_prompt": len(connector.scheduler.registry.catalogue),
            "shifted_reuse": f"refused: {refusal}" if refusal else "accepted",
        }
    finally:
        llm.llm_engine.engine_core.shutdown()
