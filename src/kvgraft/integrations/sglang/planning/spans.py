"""A stretch of a prompt that is to be loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.reuse.lineage import reused_span
from kvgraft.types import Fidelity, Match

if TYPE_CHECKING:
    from kvgraft.donors import Donor
    from kvgraft.types import SpanReport


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Consecutive prompt tokens to be loaded from one donor.

    Attributes:
        start: Position in the prompt.
        length: Number of tokens.
        donor: Where they come from; None if this rank does not know the donor that rank 0 chose.
        donor_start: Index of the first token in the donor.
        recomputed: Tokens in front of it that the donor had and that the selection policy has computed again.
        fidelity: How its K/V relate to a full prefill's.
        is_stored: Whether a store alone has the K/V; it is read before it can be loaded.
    """

    start: int
    length: int
    donor: Donor | None
    donor_start: int
    recomputed: int = 0
    fidelity: Fidelity = Fidelity.SHIFTED
    is_stored: bool = False

    @property
    def end(self) -> int:
        """First position behind the span."""
        return self.start + self.length

    def behind(self, position: int) -> Span:
        """Return the part at or behind `position`, which lies in the span."""
        cut = position - self.start
        return replace(self, start=position, length=self.length - cut, donor_start=self.donor_start + cut)

    @property
    def match(self) -> Match:
        """Where its tokens stand in the prompt and at its donor, which this rank knows."""
        assert self.donor is not None
        is_exact = self.fidelity is Fidelity.EXACT
        donor = self.donor
        return Match(self.start, donor.donor_id, self.donor_start, self.length, is_exact, donor.generation)

    def report(self) -> SpanReport:
        """Describe it once it is loaded."""
        assert self.donor is not None
        return reused_span(self.match, self.donor, is_substituted=self.fidelity is Fidelity.SUBSTITUTED)
