"""Spans of a prompt that are to be loaded, and the decision that they are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvgraft.reuse.lineage import reused_span
from kvgraft.types import CONTINUATION, Fidelity, Match

if TYPE_CHECKING:
    from kvgraft.donors import Donor
    from kvgraft.types import Miss, SpanReport, Substitution


@dataclass(frozen=True, slots=True, eq=False)
class LoadSpan:
    """Consecutive prompt tokens to be loaded from one donor.

    Attributes:
        start: Position in the prompt.
        length: Number of tokens.
        donor: The donor; None if this rank does not know the one that rank 0 chose.
        donor_start: Index of the first token in the donor.
        recomputed: Tokens before it that the donor has and that the selection policy has computed again.
        fidelity: How its K/V relate to a full prefill's.
        is_stored: Only a store has the K/V; they are read before they can be loaded.
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
        """First position after the span."""
        return self.start + self.length

    @property
    def goes_on(self) -> bool:
        """Whether it is what the prompt goes on from, and no donor of the catalogue."""
        return self.donor is not None and self.donor.donor_id == CONTINUATION

    def after(self, position: int) -> LoadSpan:
        """Return the part from `position` on, which lies in the span."""
        cut = position - self.start
        return replace(self, start=position, length=self.length - cut, donor_start=self.donor_start + cut)

    def part(self, start: int, end: int) -> LoadSpan:
        """Return the part between two positions, which lies in the span."""
        return replace(self.after(start), length=end - start)

    @property
    def match(self) -> Match:
        """The same tokens in the prompt and at the donor, which this rank knows."""
        assert self.donor is not None
        donor = self.donor
        return Match(self.start, donor.donor_id, self.donor_start, self.length, self.fidelity, donor.generation)

    def report(self) -> SpanReport:
        """Describe it once it is loaded."""
        assert self.donor is not None
        return reused_span(self.match, self.donor, is_substituted=self.fidelity is Fidelity.SUBSTITUTED)


@dataclass(frozen=True, slots=True, eq=False)
class LoadDecision:
    """The answer to a lookup, replaced whole when something else becomes true.

    Attributes:
        spans: Ascending, disjoint, whole pages after the exact prefix.
        miss: Why there are none, or None.
        lookup_ms: Duration of the lookup.
        substitution: The other text that the spans copy, or None.
        depends_on: Versions of the donors and of what requests go on from, length of the prompt, end and exact length, of
            which it is a function; None if it does not follow from a lookup.
    """

    spans: tuple[LoadSpan, ...] = ()
    miss: Miss | None = None
    lookup_ms: float = 0.0
    substitution: Substitution | None = None
    depends_on: tuple[int, int, int, int, int] | None = None

    @property
    def goes_on(self) -> Donor | None:
        """The text that the prompt goes on from, which comes first."""
        return self.spans[0].donor if self.spans and self.spans[0].goes_on else None


UNDECIDED = LoadDecision()
