"""How much memory this machine has, for settings that ask for more."""

from __future__ import annotations

import os

from kvgraft.errors import ConfigError


def physical_memory() -> int:
    """Bytes of memory: what exceeds them can be allocated on Linux, and ends the process when it is used."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
