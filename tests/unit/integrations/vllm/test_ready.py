"""`kvgraft is ready` is said when workers have proved the model, and of a server that is refused never."""

from __future__ import annotations

import logging

import pytest
from test_graft_scheduler import make_graft

from kvgraft.integrations.vllm.messages import WorkerReport


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "kvgraft")
    return lambda: [line for line in caplog.messages if "is ready" in line]


def test_it_is_said_once_workers_have_proved_the_model(said):
    graft = make_graft("sync")
    graft.receive(WorkerReport(host_bytes=1))
    assert not said()
    graft.receive(WorkerReport(is_proved=True).joined(WorkerReport(host_bytes=1)))
    graft.receive(WorkerReport(host_bytes=2))
    assert said() == ["kvgraft is ready: mode graft, selection none, up to 1200 donor tokens"]


def test_workers_that_refuse_are_never_ready(said):
    graft = make_graft("sync")
    graft.receive(WorkerReport(refusal="unknown KV cache layout"))
    graft.receive(WorkerReport(is_proved=True))
    assert not said()
