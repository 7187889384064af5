"""Layout of every table of docs/results.md: `BLOCKS`, Markdown by name of a block, and `panels`, its picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import answers, cosine, cost, datasets, engines, length, peers, quality, recorded, repair, similarity, turns

if TYPE_CHECKING:
    from types import ModuleType

TABLES: dict[str, ModuleType] = {
    "length": length,
    "similarity": similarity,
    "datasets": datasets,
    "turns": turns,
    "engines": engines,
    "quality": quality,
    "peers": peers,
    "cost": cost,
    "repair": repair,
    "answers": answers,
    "cosine": cosine,
    "recorded": recorded,
}
"""In the order of the page, T1 to T12."""
