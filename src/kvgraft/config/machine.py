"""How much memory this machine has, for settings that ask for more."""

from __future__ import annotations

import os
from pathlib import Path

from kvgraft.errors import ConfigError


def physical_memory() -> int:
    """Bytes of memory: what exceeds them can be allocated on Linux, and ends the process when it is used."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take without another giving any up: of the machine, and of its control groups.

    Args:
        proc: The kernel's files about the machine and this process.
        cgroups: Its files about control groups, of both versions.
    """
    free = [physical_memory()]
    memory = _numbers(proc / "meminfo", ":")
    if "MemAvailable" in memory:
        free.append(memory["MemAvailable"] << 10)
    for folder, limit, usage in _groups(proc, cgroups):
        stat = _numbers(folder / "memory.stat", " ")
        # What was read of files counts as used, and is dropped where memory runs short: weights that were loaded before, say.
        dropped = sum(stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file"))
        most, used = _number(folder / limit), _number(folder / usage)
        if most is not None and used is not None:
            free.append(max(0, most - used + dropped))
    return min(free)


def _groups(proc: Path, cgroups: Path) -> list[tuple[Path, str, str]]:
    """Folders of the control groups that bound this process's memory, with the names of the files that say how."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    found = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "memory" in controllers.split(","):
            root, names = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        elif not controllers:
            root, names = cgroups, ("memory.max", "memory.current")
        else:
            continue
        folder = root / path.lstrip("/")
        # In a container the path is often the host's, and what is mounted is the group itself. Groups above bound, too.
        found += [(each, *names) for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return found


def _numbers(file: Path, separator: str) -> dict[str, int]:
    """Names and numbers of a file of the kernel's; empty where it cannot be read."""
    try:
        pairs = (line.partition(separator) for line in file.read_text().splitlines())
        return {
            name: int(value.split()[0]) for name, _, value in pairs if value.split()[:1] and value.split()[0].isdigit()
        }
    except (OSError, ValueError):
        return {}


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def check_host_memory(name: str, value: int, bytes_each: int = 1) -> None:
    """Refuse a setting that takes more memory than the machine has.

    Args:
        name: Of the setting.
        value: Its value.
        bytes_each: Memory that one unit of it takes.

    Raises:
        ConfigError: It does; names a value that leaves half of it to others.
    """
    memory = physical_memory()
    if value * bytes_each > memory:
        raise ConfigError(
            f"{name}={value} takes {_gib(value * bytes_each)} of host memory and this machine has {_gib(memory)}; "
            f"give {memory // 2 // bytes_each} or less"
        )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
