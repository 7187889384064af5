"""Tests of clients against a real server. They run in an environment of their own (`make test-clients`), else are skipped."""

from __future__ import annotations

import os

import pytest
from tests.clients.served import ELSEWHERE, IN_CLIENTS_ENVIRONMENT, serving, write_model

if IN_CLIENTS_ENVIRONMENT:
    # Nothing is asked of a hub, nobody is told that a test has run.
    os.environ.update(
        HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", LITELLM_LOCAL_MODEL_COST_MAP="True", DO_NOT_TRACK="1"
    )


def pytest_configure(config):
    if IN_CLIENTS_ENVIRONMENT:
        config.addinivalue_line(
            "filterwarnings", "ignore"
        )  # of clients and what they import; of ours nothing runs in this process


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A server of graft-tiny with a chat template, for all clients."""
    if not IN_CLIENTS_ENVIRONMENT:
        pytest.skip(ELSEWHERE)
    with serving(write_model(tmp_path_factory.mktemp("model"))) as served:
        yield served
