"""The connector that benchmarks set beside ours does nothing, and is one of vLLM's."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")


def test_it_can_be_built_and_finds_nothing(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4] / "benchmarks" / "engines"))
    from idle_connector import IdleConnector

    assert not IdleConnector.__abstractmethods__
    connector = object.__new__(IdleConnector)
    assert connector.get_num_new_matched_tokens(None, 0) == (0, False)
    assert connector.request_finished_all_groups(None, ()) == (False, None)
