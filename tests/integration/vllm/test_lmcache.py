"""LMCache beside grafts, in a process of its own: what it imports keeps vLLM from starting a second engine in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lmcache_server import FOLDER

CASES = Path(__file__).parent / "lmcache_cases.py"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not (FOLDER / "lmcache").is_dir(), reason="LMCache is not installed: `make test-vllm` does that"
    ),
]


def test_lmcache_keeps_exact_prefixes_while_kvgraft_grafts():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:logging", str(CASES)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:]
    assert f"{CASES.read_text().count('def test_') + 2} passed" in run.stdout, "two cases run for two modes"
