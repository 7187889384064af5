"""`examples/vllm_rag.py` against a real vLLM server."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from http_server import http_server

ROOT = Path(__file__).parents[3]


def test_passages_of_an_earlier_question_are_reused(tmp_path):
    questions = ["Which tokens are copied from donors?", "Are copied tokens of donors computed again?"]
    with http_server(tmp_path / "log") as url:
        command = [sys.executable, str(ROOT / "examples" / "vllm_rag.py"), "--url", url, "--folder", str(ROOT / "docs")]
        asked = subprocess.run([*command, "--passages", "4", *questions], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    (_, nothing), (_, moved) = re.findall(r"(\d+) reused, (\d+) of them moved", asked.stdout)
    assert nothing == "0"
    assert int(moved) > 100
