"""Requests as the list shows them."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraft.explain import ReportedAttempt
    from kvgraft.inspector.entries import Entry

_CELLS = 240
"""Parts into which the bar of a prompt is divided; what is shorter than half of one is not drawn."""


def row(entry: Entry) -> dict[str, Any]:
    """Return a request in types that JSON has. Seconds become milliseconds."""
    return {
        "number": entry.number,
        "ended": entry.ended,
        "id": entry.request_id,
        "outcome": entry.outcome,
        "reuse": entry.reuse,
        "prompt_tokens": entry.prompt_tokens,
        "output_tokens": entry.output_tokens,
        "ttft_ms": _milliseconds(entry.ttft_s),
        "total_ms": _milliseconds(entry.total_s),
        "counts": dict(entry.counts),
        "miss": entry.miss,
        "why": entry.why,
        "bar": [] if entry.explained is None else bar(entry.explained().last),
    }


def bar(attempt: ReportedAttempt, cells: int = _CELLS) -> list[tuple[str, int]]:
    """Divide a prompt into `cells` and return adjacent ones of a fate as `(fate, how many)`; their sum is `cells`."""
    scale = cells / max(1, attempt.num_tokens)
    ends = [(str(piece.kind), round(piece.stop * scale)) for piece in attempt.pieces()]
    starts = [0, *(end for _, end in ends)]
    wide = [(kind, end - start) for (kind, end), start in zip(ends, starts, strict=False) if end > start]
    return [(kind, sum(width for _, width in group)) for kind, group in groupby(wide, key=lambda part: part[0])]


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 2)
