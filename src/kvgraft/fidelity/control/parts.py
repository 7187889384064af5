"""Parts of an answer whose risks differ, because their K/V do. Each is calibrated, audited and certified for itself."""

from __future__ import annotations

from enum import StrEnum

from kvgraft.types import RepairTime


class AnswerPart(StrEnum):
    """Tokens of an answer that were drawn from K/V in one state."""

    FIRST = "first"
    """The first token of an answer that is repaired after it: nothing reused had been computed again."""
    LATER = "later"
    """Its tokens from the second on, drawn after the repair."""
    WHOLE = "whole"
    """All tokens of an answer that waited for the repair."""


PARTS = {
    RepairTime.AFTER: (AnswerPart.FIRST, AnswerPart.LATER),
    RepairTime.BEFORE: (AnswerPart.WHOLE,),
}
"""Parts of an answer by when it was repaired."""
