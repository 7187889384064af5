"""Run the command line `llm`, which is installed in a folder beside the other clients."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.clients.served import PATIENCE_S

FOLDER = Path(sys.prefix) / "llm"


def run_llm(users_folder: Path, *arguments: str) -> str:
    """Return what `llm` prints that finds models, keys and its log in `users_folder`; it must not fail."""
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        env=os.environ | {"LLM_USER_PATH": str(users_folder), "PYTHONPATH": str(FOLDER)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
