"""Kinds of grafts whose errors differ. Each is audited for itself: a mean over all of them would hide the worst one."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.types import SpanReport


class ReuseClass(StrEnum):
    """How a prompt's grafts relate to their donors."""

    CONTINUED = "continued"
    """Nothing is copied: it goes on from what an earlier request was answered from."""
    IN_PLACE = "in_place"
    """Every span stands where it was computed; only the text before it differs."""
    SHIFTED = "shifted"
    """Spans of one donor, in its order, at other positions."""
    COMPOSED = "composed"
    """Spans of several donors, or of one in another order."""


def reuse_class(spans: Sequence[SpanReport]) -> ReuseClass:
    """Return the class of a request with these spans, of which there is at least one, in prompt order."""
    if all(span.position_delta == 0 for span in spans):
        return ReuseClass.IN_PLACE
    is_ordered = all(a.donor_start + a.length <= b.donor_start for a, b in pairwise(spans))
    if len({span.donor_id for span in spans}) == 1 and is_ordered:
        return ReuseClass.SHIFTED
    return ReuseClass.COMPOSED
