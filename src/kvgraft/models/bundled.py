"""Where the bundled model lies."""

from __future__ import annotations

from pathlib import Path

BUNDLED_MODEL = "graft-tiny"


def bundled_model_path() -> Path:
    """Directory of `graft-tiny`: config, bf16 safetensors, tokenizer, training record and model card."""
    return Path(__file__).parent / BUNDLED_MODEL
