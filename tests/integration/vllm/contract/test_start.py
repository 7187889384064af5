"""What the connector tries out at start, on the vLLM that is installed."""

from __future__ import annotations

import inspect

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from kvgraft.integrations.vllm import contract


def test_nothing_differs():
    assert contract.drift() == ""


def test_a_request_that_forgets_its_private_blocks_is_noticed(monkeypatch):
    monkeypatch.setattr(contract, "make_private", lambda request, first_block: None)
    assert "cannot be kept private" in contract.drift()


def test_a_request_of_another_kind_is_noticed(monkeypatch):
    monkeypatch.setattr(contract, "_request", lambda hasher: object())
    assert "cannot be kept private" in contract.drift()


def test_a_field_that_is_gone_is_named(monkeypatch):
    (kind, needed), *_ = contract.FIELDS.items()
    monkeypatch.setitem(contract.FIELDS, kind, needed | {"moon"})
    assert f"{kind.__name__} lacks moon" in contract.drift()


def test_hashes_are_only_ever_appended():
    """Private hashes live in the request's own list: vLLM must go on with the one that it finds."""
    assert "self.block_hashes.extend(self._block_hasher(self))" in inspect.getsource(Request.update_block_hashes)
    assert inspect.getsource(Request).count("self.block_hashes:") == 1


def test_nobody_is_admitted_in_a_step_that_preempts():
    """A preempted request's private hashes are renewed with the step's commands, in front of its next lookup."""
    source = inspect.getsource(Scheduler.schedule)
    assert source.index("if not preempted_reqs and") < source.index("connector.get_num_new_matched_tokens(")
    assert "self.reset_preempted_req_ids.add(" in inspect.getsource(Scheduler._preempt_request)
    assert "preempted_req_ids=self.reset_preempted_req_ids" in source


def test_resets_reach_the_connector():
    reset = inspect.getsource(Scheduler.reset_prefix_cache)
    assert reset.index("kv_cache_manager.reset_prefix_cache()") < reset.index("self.reset_connector_cache()")
    assert "self.connector.reset_cache()" in inspect.getsource(Scheduler.reset_connector_cache)
    assert "reset_connector: bool = True" in inspect.getsource(EngineCore._reset_caches)
    assert "clear_cache=clear_prefix_cache" in inspect.getsource(EngineCore.sleep)
