"""These tests run in the engine's own environment (`make test-sglang`); elsewhere nothing here is collected."""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py", "*.py"]
else:
    here = Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parents[1] / "standins")]
    # What a server's processes get at start-up; this one imports SGLang too.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    runpy.run_path(str(here / "standins" / "sitecustomize.py"), run_name="sitecustomize")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    """Return a function that writes a tiny model by name and returns its directory."""
    from models import write_model

    folder = tmp_path_factory.mktemp("models")
    return lambda name: write_model(name, folder)
