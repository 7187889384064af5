"""Commit, versions and machine of a measurement, to repeat it."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kvgraft

_PACKAGES = ("kvgraft", "numpy", "torch", "transformers", "tokenizers")


def environment() -> dict[str, object]:
    """Return commit (of a source checkout, `+` where its sources were changed), versions and machine."""
    return {
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }


def commit() -> str | None:
    """Return the short hash of the checkout that this package is run from; None without one, or without git."""
    folder = Path(kvgraft.__file__).parent
    head = _git(folder, "rev-parse", "--short", "HEAD")
    if not head or not _git(folder, "ls-files", "--error-unmatch", "__init__.py"):
        return None
    return head + ("+" if _git(folder, "status", "--porcelain", ".") else "")


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
