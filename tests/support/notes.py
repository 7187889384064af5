"""A pack of pairs of notes that differ in the answer to one question."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_NOTES = " ".join(f"Shelf {n} has {7 * n} boxes of paper and {n + 3} lamps." for n in range(1, 9))


def write_pairs_of_notes(folder: Path, count: int) -> None:
    """Write the pack `adversarial`; copies are other pairs of another beginning."""
    lines = [
        {
            "pid": n,
            "a": f"List {'x' * n} of the store. {_NOTES} The key lies on shelf 12.",
            "b": f"List {'x' * n} of the store. It was checked. {_NOTES} The key lies on shelf 47.",
            "question": "On which shelf does the key lie?",
            "answer_a": "12",
            "answer_b": "47",
        }
        for n in range(count)
    ]
    (folder / "adversarial.pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
