"""A small file per scheduler process that says whether the backend is live in it, for `kvgraft doctor`."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from pathlib import Path


def state_directory(configured: str) -> Path:
    """Return the directory of the files."""
    return Path(configured) if configured else Path(tempfile.gettempdir()) / f"kvgraft-sglang-{os.getuid()}"


def write_status(directory: Path, status: dict[str, object]) -> Path:
    """Write the status of this process; a file of an earlier process with the same id is replaced."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{os.getpid()}.json"
    path.write_text(json.dumps({**status, "pid": os.getpid(), "since": time.time()}), encoding="utf-8")
    return path


def live_statuses(directory: Path) -> list[dict[str, object]]:
    """Return the status of every process that still runs; files of others are removed."""
    found = []
    for path in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        try:
            status = json.loads(path.read_text(encoding="utf-8"))
            os.kill(int(status["pid"]), 0)
        except (OSError, ValueError, KeyError):
            with contextlib.suppress(OSError):
                path.unlink()
            continue
        found.append(status)
    return found
