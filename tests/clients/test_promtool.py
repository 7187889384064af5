"""Prometheus' own check of what a server shows after real requests."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest


def test_promtool_finds_nothing_but_the_colons(server):
    """Which docs/running.md explains; on Debian promtool is in `prometheus`."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (apt install prometheus)")
    server.post("/v1/completions", prompt="import ", max_tokens=3)
    exposition = server.get("/metrics")
    assert "kvgraft:generation_tokens_total" in exposition
    done = subprocess.run([promtool, "check", "metrics"], input=exposition, capture_output=True, text=True, check=False)
    complaints = (done.stdout + done.stderr).splitlines()
    assert not [
        line for line in complaints if not re.fullmatch(r"kvgraft:\w+ metric names should not contain ':'", line)
    ]
    assert complaints, "promtool has read nothing"
