"""Models with layers that have no K/V: one refusal, by the kind of the layer."""

from __future__ import annotations

import logging

import pytest

from engines import engine


@pytest.fixture(scope="module")
def log():
    """What kvgraft says from the start on."""
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    logger = logging.getLogger("kvgraft")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def hybrid(log, model_folder):
    with engine(model_folder, "jamba", mamba_cache_mode="align") as running:
        yield running


def test_a_hybrid_is_refused_in_one_line(hybrid, log):
    """It is not asked anything: vLLM's CPU build starts it and lacks the mixer's kernels."""
    assert hybrid.scheduler.refusal == "layers of kind MambaSpec are not supported"
    assert hybrid.worker.refusal == hybrid.worker.description["self_check"] == hybrid.scheduler.refusal
    told = [record.getMessage() for record in log if record.levelno >= logging.WARNING]
    assert told == ["kvgraft grafts nothing on this server: layers of kind MambaSpec are not supported"]
