"""What has been measured, part by part, in a file that is there at any time, and what it comes to."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.errors import is_out_of_memory, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_FRAMES = 6
"""Innermost frames of a failure that the file keeps."""


@dataclass(frozen=True, slots=True)
class PartName:
    """One measurement: of which model, in which precision, with which attention."""

    model: str
    dtype: str
    attention: str
    part: str


class Record:
    """What has been measured so far; written to a file after everything that is new.

    Args:
        file: None to keep it in memory.
        head: What stands before the parts.
        show: Called with every part that is over.
    """

    def __init__(self, file: Path | None, head: dict[str, Any], show: Callable[[dict[str, Any]], object]) -> None:
        self._file = file
        self._show = show
        self.parts: list[dict[str, Any]] = []
        self.content: dict[str, Any] = {**head, "parts": self.parts}
        self.write()

    def begin(self, name: PartName) -> dict[str, Any]:
        """Add a part that is not over."""
        self.parts.append({**asdict(name), "unfinished": True})
        self.write()
        return self.parts[-1]

    def end(self, part: dict[str, Any], **outcome: object) -> None:
        """Note the outcome of a part: `result`, `skipped` or `failed`."""
        part.pop("unfinished", None)
        part |= outcome
        self.write()
        self._show(part)

    def write(self) -> None:
        """Replace the file by one with all that there is."""
        if self._file is None:
            return
        beside = self._file.with_name(self._file.name + ".part")
        beside.write_text(json.dumps(self.content, indent=1) + "\n", encoding="utf-8")
        beside.replace(self._file)


def verdict(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up: whether all that was compared is exact, how many rows of repair are free, and what failed or was left out.

    `repair_rows` is that of the attention with the fastest plain step, of the first model that was measured.
    """
    results = [part for part in parts if "result" in part]
    compared = [part["result"]["is_exact"] for part in results if part["part"] == "exactness"]
    steps = [part for part in results if part["part"] == "decode_step" and part["result"]["rows"]]
    mine = [part for part in steps if part["model"] == steps[0]["model"]]
    fastest = min(mine, key=lambda part: part["result"]["rows"][0]["step_ms"], default=None)
    return {
        "is_exact": all(compared) if compared else None,
        "repair_rows": None if fastest is None else fastest["result"]["repair_rows"],
        "failed": sum("failed" in part for part in parts),
        "skipped": sum("skipped" in part for part in parts),
    }


def failure(error: Exception) -> dict[str, Any]:
    """Return the outcome of a part that raised: memory that is out is no failure."""
    if is_out_of_memory(error):
        return {"skipped": f"out of memory: {one_line(error)}"}
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return {"failed": one_line(error), "at": [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]}
