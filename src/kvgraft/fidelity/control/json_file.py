"""Small versioned JSON files: written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_LARGEST_BYTES = 8 << 20


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """Replace the file at `path` in one step; readers see the old one or the new one. Raises `OSError`."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(values, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise


def read_json(path: Path) -> dict[str, object]:
    """Return the object in the file at `path`.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no JSON object of reasonable size.
    """
    with path.open("rb") as file:
        raw = file.read(_LARGEST_BYTES + 1)
    if len(raw) > _LARGEST_BYTES:
        raise ValueError("larger than any such file")
    try:
        values = json.loads(raw)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError("no JSON object")  # noqa: TRY004 - of the file's content, not of a caller's argument
    return values
