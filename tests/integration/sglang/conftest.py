"""These tests run in the engine's own environment (`make test-sglang`); elsewhere nothing here is collected."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py", "*.py"]
else:
    sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Return a function that writes a tiny model by name and returns its directory."""
    from models import write_model

    folder = tmp_path_factory.mktemp("models")
    return lambda name: write_model(name, folder)
