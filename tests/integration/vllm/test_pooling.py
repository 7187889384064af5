"""Pooling models: every position counts towards the answer, and a graft leaves most of them out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from models import save_tiny
from vllm.config import PoolerConfig

from engines import engine, text
from kvgraft.models import bundled_model_path

DOCUMENT = text(1, 600)
FIRST, SECOND = text(2, 40) + DOCUMENT + text(3, 20), text(4, 90) + DOCUMENT + text(5, 20)


@pytest.fixture(scope="module", params=["LAST", "MEAN"])
def pooling(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for file in Path(bundled_model_path()).glob("tokenizer*"):  # vLLM insists on one; it is not used
        shutil.copy(file, save_tiny("qwen3", folder))
    pooler = PoolerConfig(pooling_type=request.param, use_activation=False)
    kind = {"runner": "pooling", "convert": "embed", "pooler_config": pooler, "enable_prefix_caching": None}
    with engine(folder, **kind, skip_tokenizer_init=False) as running:
        yield running


def embedding(pooling, tokens):
    (output,) = pooling.llm.embed([{"prompt_token_ids": tokens}], use_tqdm=False)
    return torch.tensor(output.outputs.embedding)


def test_an_embedding_does_not_depend_on_what_others_asked(pooling):
    alone = embedding(pooling, SECOND)
    pooling.llm.reset_prefix_cache(reset_connector=True)
    embedding(pooling, FIRST)
    assert torch.allclose(embedding(pooling, SECOND), alone, atol=1e-6)


def test_reuse_is_refused_at_start_in_one_line(pooling):
    assert pooling.scheduler.refusal == "pooling models are not supported: their answers come from every position"
    embedding(pooling, FIRST)
    assert pooling.worker.refusal == pooling.scheduler.refusal
    assert not len(pooling.scheduler.registry.catalogue)
    pooling.check()
