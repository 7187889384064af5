"""How far the reused text of a request has moved: one class per request, that of most of its reused tokens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.types import SpanReport

OWN, NEAR, FAR, REORDERED, EDITED = "own position", "shifted < 256", "shifted more", "reordered", "edited neighbour"
CLASSES = (OWN, NEAR, FAR, REORDERED, EDITED)
_NEAR_TOKENS = 256
_EDIT_TOKENS = 32
"""Longest text between two spans, in prompt and donor, that counts as an edit of one text."""


def distance_class(spans: Sequence[SpanReport], prefix_len: int = 0) -> str | None:
    """Return the class of most tokens of `spans`, None where there is no span.

    A span is an *edited neighbour* if a few tokens beside it, and nothing else, differ from its donor; else *reordered*
    if text of the same donor that stood after it there stands before it here; else it counts by how far it has moved.

    Args:
        spans: Of one prompt.
        prefix_len: Length of the exact prefix before them.
    """
    tokens: Counter[str] = Counter()
    ordered = sorted(spans, key=lambda span: span.target_start)
    edited = {id(after) for before, after in pairwise(ordered) if _is_edit(before, after)}
    edited |= {id(before) for before, after in pairwise(ordered) if _is_edit(before, after)}
    edited |= {id(span) for span in ordered[:1] if prefix_len and _is_after_edit(span, prefix_len)}
    for number, span in enumerate(ordered):
        tokens[EDITED if id(span) in edited else _class(span, ordered[:number])] += span.length
    return max(CLASSES, key=lambda name: tokens[name]) if tokens else None


def _class(span: SpanReport, before: Sequence[SpanReport]) -> str:
    if any(other.donor_id == span.donor_id and other.donor_start > span.donor_start for other in before):
        return REORDERED
    if span.position_delta == 0:
        return OWN
    return NEAR if abs(span.position_delta) < _NEAR_TOKENS else FAR


def _is_edit(before: SpanReport, after: SpanReport) -> bool:
    """Return whether both are of one donor, with little between them in prompt and donor."""
    here = after.target_start - before.target_start - before.length
    there = after.donor_start - before.donor_start - before.length
    return before.donor_id == after.donor_id and _is_short(here, there)


def _is_after_edit(span: SpanReport, prefix_len: int) -> bool:
    """Return whether there is little between an exact prefix and the span, in prompt and donor."""
    return _is_short(span.target_start - prefix_len, span.target_start - span.position_delta - prefix_len)


def _is_short(here: int, there: int) -> bool:
    return 0 <= here <= _EDIT_TOKENS and 0 <= there <= _EDIT_TOKENS and here + there > 0
