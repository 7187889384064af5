"""Files of a model's directory with weights that transformers would load."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


def weight_files(folder: Path) -> list[Path]:
    """Files of a directory that would be loaded, maybe none. Some models lie there twice, in shards and consolidated."""
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = next((found for pattern in _WEIGHTS if (found := sorted(folder.glob(pattern)))), [])
    return [file for file in found if not file.name.startswith("consolidated")] or found
