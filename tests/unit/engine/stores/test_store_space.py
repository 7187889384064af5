"""Opening of an engine's stores where its K/V cannot be moved."""

from __future__ import annotations

import logging

from kvgraft.config import EngineConfig
from kvgraft.engine import store_space
from kvgraft.testing.memory_store import MemoryStore


def test_a_store_that_is_not_used_is_named_without_its_password(monkeypatch, caplog):
    monkeypatch.setattr(store_space, "open_stores", lambda _: (MemoryStore(),))
    config = EngineConfig(store="redis://me:s3cret@127.0.0.1:6379/0,file:/donors")
    with caplog.at_level(logging.WARNING):
        assert store_space.open_store_tier(config, None, None, None, "its keys cannot be moved") is None
    assert "redis://***@127.0.0.1:6379/0,file:/donors is not used: its keys cannot be moved" in caplog.text
    assert "s3cret" not in caplog.text
