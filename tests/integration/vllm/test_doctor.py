"""What a server says of itself: in its log when workers have proved the model, and in `kvgraft doctor` where they cannot."""

from __future__ import annotations

import gc
import logging

import pytest
from models import save_tiny
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from engines import engine, text
from kvgraft.errors import IntegrationError
from kvgraft.integrations.vllm.doctor import diagnose
from kvgraft.integrations.vllm.worker import layers


@pytest.fixture
def said():
    """Lines of our log from the start on."""
    lines = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("kvgraft")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def unknown_layout(monkeypatch):
    def refuse(*args):
        raise IntegrationError("unknown KV cache layout; use another")

    monkeypatch.setattr(layers, "choose_codec", refuse)


def ready(said):
    return [line for line in said if line.startswith("kvgraft is ready: mode graft, selection query_seam, up to ")]


def test_a_server_is_ready_once_its_workers_have_proved_the_model(model_folder, said):
    with engine(model_folder) as one:
        assert not any("is ready" in line for line in said)
        one.ask(text(1, 40), max_tokens=2)
        assert len(ready(said)) == 1
        one.ask(text(2, 40), max_tokens=2)
        assert len(ready(said)) == 1
        assert one.worker.description["self_check"] == "passed"
        assert one.worker.description["kv_dtype"] == "float32"


@pytest.mark.usefixtures("unknown_layout")
def test_the_doctor_tells_of_a_layout_that_nobody_knows(model_folder, said):
    try:
        found = diagnose(save_tiny("qwen3", model_folder))
    finally:
        gc.collect()
        cleanup_dist_env_and_memory()
    assert found["shifted_reuse"] == "refused: unknown KV cache layout; use another"
    assert found["self_check"] == "unknown KV cache layout; use another"
    assert "kv_layouts" not in found
    assert not any("is ready" in line for line in said)
