"""This process: versions, resident memory, and the memory that it may take. Reads `/proc` and cgroups."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft import __version__
from kvgraft.config import physical_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of this process.

    Attributes:
        resident_bytes: What it has in physical memory; None where the system does not say (no `/proc`).
        limit_bytes: What it may take before it is ended.
        limited_by: `cgroup` (a container, a systemd unit) or `machine`.
    """

    resident_bytes: int | None
    limit_bytes: int
    limited_by: str


def process_memory(root: Path = _ROOT) -> ProcessMemory:
    """Look now; some file reads, tens of microseconds. `root` is where `/proc` and `/sys` are."""
    machine = physical_memory()
    limit = min(_cgroup_limits(root), default=machine)
    if limit < machine:
        return ProcessMemory(_resident_bytes(root), limit, "cgroup")
    return ProcessMemory(_resident_bytes(root), machine, "machine")


def build_info() -> dict[str, str]:
    """Versions by label name; what is not installed is empty. Imports nothing."""
    versions = {"version": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"torch": "", "transformers": ""} | versions


def _resident_bytes(root: Path) -> int | None:
    try:
        return int((root / "proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the limits of this process's cgroup and of those around it; none where there are none."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _limits_along(root / "sys/fs/cgroup", path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_along(root / "sys/fs/cgroup/memory", path, "memory.limit_in_bytes")


def _limits_along(mount: Path, path: str, name: str) -> Iterator[int]:
    """Yield what the files of a name say from a cgroup up to the mount; `max` and numbers beyond all memory say nothing.

    In a container the path may be that of the host, of which only the container's own end is mounted.
    """
    folder = mount / path.lstrip("/")
    for place in (folder, *folder.parents):
        with contextlib.suppress(OSError, ValueError):
            yield int((place / name).read_text())
        if place == mount:
            return
