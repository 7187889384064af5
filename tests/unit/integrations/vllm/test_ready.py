"""`kvgraft is ready` is said when workers have proved the model, and of a server that is refused never."""

from __future__ import annotations

import logging

import pytest
from stand_ins import Engine, Request
from test_graft_scheduler import DOCUMENTS, make_graft

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


def test_a_policy_that_workers_cannot_run_is_replaced_and_named_in_reports(said):
    """Of a model with attention sinks nothing can be looked at."""
    engine = Engine(make_graft("sync", selection="query_seam"))
    graft = engine.graft
    graft.receive(WorkerReport(is_proved=True).joined(WorkerReport(fallback="first_k")))
    assert "selection first_k" in said()[0]
    engine.add(Request("donor", DOCUMENTS[0] + [1, 2], {"kvgraft": "exact"}, 1))
    for _ in range(2):
        engine.step(room=True, chunk=400)
    request = Request("one", [*range(5000, 5040)] + DOCUMENTS[0] + [7000] * 40, {"kvgraft_repair": "before"}, 4)
    engine.add(request)
    engine.step(room=True, chunk=400)
    claim = graft._attempts.running["one"].claim
    assert claim.num_rows == 40 + 16, "gaps, and the first tokens of the run; no rows are run to look"
    assert graft.finish(request)["kvgraft"]["policy"] == "first_k"
