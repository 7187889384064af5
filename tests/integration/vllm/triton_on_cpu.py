"""Model Runner V2 on a CPU: its kernels are Triton's, which the interpreter of Triton runs, slowly and without a GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

VARIABLE = "TRITON_FOR_RUNNER_V2"
"""Folder with Triton in it; `make test-vllm-v2` installs one and sets this."""


def use_runner_v2(folder: str) -> None:
    """Have vLLM find Triton in `folder`, interpreted, and choose Model Runner V2. Before vLLM is imported."""
    assert "vllm" not in sys.modules
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    sys.path.insert(0, str(Path(folder).resolve()))
    from triton.backends import backends

    driver = SimpleNamespace(is_active=lambda: True)
    backends.clear()
    backends["cpu"] = SimpleNamespace(driver=driver, compiler=None)  # what vLLM's CPU build looks for
