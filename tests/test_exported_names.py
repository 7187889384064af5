from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "kvgraft.prefix",
        "kvgraft.donors",
        "kvgraft.memory",
        "kvgraft.graft.select",
        "kvgraft.config",
        "kvgraft.engine",
        "kvgraft.engine.attention",
        "kvgraft.observability",
        "kvgraft.reuse",
        "kvgraft.server",
        "kvgraft.fidelity",
    ],
)
def test_all_is_complete_and_importable(name):
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for exported in module.__all__:
        assert getattr(module, exported) is not None
