"""`examples/sglang_agent.py` against a real SGLang server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from server import FLAGS, SGLangServer

from kvgraft.models import bundled_model_path

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[3]


def test_what_the_agent_has_read_is_reused_behind_its_clock():
    flags = tuple(flag for flag in FLAGS if flag != "--skip-tokenizer-init")
    with SGLangServer(str(bundled_model_path()), {"--context-length": "4096"}, flags=flags) as server:
        command = [sys.executable, str(ROOT / "examples" / "sglang_agent.py"), "--steps", "3", "Find the index."]
        command += ["--url", f"http://127.0.0.1:{server.port}", "--folder", str(ROOT / "src" / "kvgraft" / "donors")]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    steps = [tuple(map(int, step)) for step in re.findall(r"(\d+) prompt tokens, (\d+) reused", asked.stdout)]
    assert len(steps) == 4, asked.stdout
    assert [reused > 100 for _, reused in steps] == [False, True, True, True], asked.stdout
