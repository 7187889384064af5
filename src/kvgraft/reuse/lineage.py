"""The origin of every position's K/V of a request, through everything that an engine does to it.

The one place that says for all engines which K/V of a request may be given to an exact prefix cache, which text of it may
become a donor and of which generation, and which classes its report counts.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.errors import CorruptCacheError
from kvgraft.types import CONTINUATION, Fidelity, SpanReport

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvgraft.donors import Donor
    from kvgraft.types import Match


_IN_PLACE = (Fidelity.EXACT, Fidelity.CONTINUED)
"""Classes of text that stands where it was computed, after the same text: nothing of it is computed again."""


class ComputedRun(NamedTuple):
    """Positions `[start, stop)` that were computed, and the generation of a donor made of them."""

    start: int
    stop: int
    generation: int


class Lineage:
    """The origin of each position of one request, from its admission to its end. Not thread-safe.

    A position is

    - *given*, below `prefix_len`: the engine's exact prefix cache had it when the request was admitted;
    - *continued*, in the first ones of `spans`: the engine had it, approximate, from one that went on from the same text;
    - *copied*, in another of `spans`: K/V of a donor, approximate unless the span is exact;
    - *computed*, everywhere else, by a forward pass of this request. What is computed after something approximate attends to
      it and is approximate too. A copy is of one generation more than its donor, wherever that text stood before; what is
      continued or computed is of the highest generation that it attended to. So generations count copies, not turns.

    An engine may take a request's K/V away and let it begin again (preemption, retraction, a failed load). What its cache
    then gives back has the class that it had before, even where the cache takes it for exact: `restart`. And it may compute
    what is approximate once more, from its exact prefix onwards: `heal`.

    Invariant (`check`): spans ascend, are disjoint and begin at or after `prefix_len`; what was computed over copies lies in
    approximate ones.
    """

    def __init__(self, prefix_len: int) -> None:
        """Begin with a request that was given exact K/V of its first `prefix_len` positions."""
        self._prefix_len = prefix_len
        self._spans: tuple[SpanReport, ...] = ()
        self._exposed: tuple[tuple[int, int], ...] = ()
        self._recomputed_runs: tuple[tuple[int, int], ...] = ()
        self._recomputed_in_gaps = 0
        self._healed_len = 0

    @property
    def prefix_len(self) -> int:
        """Positions that came from the engine's exact prefix cache; never more than at the first admission."""
        return self._prefix_len

    @property
    def spans(self) -> tuple[SpanReport, ...]:
        """Copied spans, ascending, those tokens included that were computed again afterwards."""
        return self._spans

    @property
    def recomputed(self) -> int:
        """Tokens that a donor had and that a selection policy had computed again."""
        return self._recomputed_inside + self._recomputed_in_gaps

    @property
    def recomputed_runs(self) -> tuple[tuple[int, int], ...]:
        """Ascending `(start, length)` of those that were computed over copies; those in gaps are not among them."""
        return self._recomputed_runs

    @property
    def _recomputed_inside(self) -> int:
        return sum(length for _, length in self._recomputed_runs)

    @property
    def is_approximate(self) -> bool:
        """Whether anything approximate was put in, or attended to."""
        return bool(self._exposed) or any(span.fidelity is not Fidelity.EXACT for span in self._spans)

    @property
    def goes_on(self) -> bool:
        """Whether the engine had approximate K/V of its beginning, where they are: `go_on`."""
        return any(span.donor_id == CONTINUATION for span in self._spans)

    @property
    def has_copies(self) -> bool:
        """Whether this request copied anything approximate itself, or attended to such: what goes on is no copy."""
        return bool(self._exposed) or any(span.fidelity not in _IN_PLACE for span in self._spans)

    def copied_tokens(self, fidelity: Fidelity) -> int:
        """Tokens of one class that stayed as they were copied, and were not computed again. O(spans log runs + runs)."""
        return sum(each.length - self._num_again(each) for each in self._spans if each.fidelity is fidelity)

    def _num_again(self, span: SpanReport) -> int:
        """Tokens of a span that were computed over its copy: policies choose single ones, so runs are many."""
        runs, start, stop = self._recomputed_runs, span.target_start, span.target_start + span.length
        first = max(0, bisect_left(runs, (start,)) - 1)
        inside = runs[first : bisect_left(runs, (stop,))]
        return sum(max(0, min(stop, at + count) - max(start, at)) for at, count in inside)

    def go_on(self, stop: int, generation: int, *, start: int | None = None, tier: str = "device") -> None:
        """Note that the engine had the K/V of all positions between the exact prefix and `stop`, where they are.

        To be called before anything is copied.

        Args:
            stop: First position after them.
            generation: The highest in them: what is computed after them is of the same.
            start: Their first position: the end of what is exact, or the `stop` of another part; None for the exact prefix.
            tier: Where the K/V lay.
        """
        start = self._prefix_len if start is None else start
        if stop > start:
            length = stop - start
            span = SpanReport(start, length, CONTINUATION, start, 0, Fidelity.CONTINUED, generation, tier)
            self._spans = tuple(sorted((*self._spans, span), key=lambda each: each.target_start))

    def copy(self, spans: Iterable[SpanReport]) -> None:
        """Note that the K/V of donors now lie at the positions of `spans`, all after those copied so far."""
        self._spans += tuple(spans)

    def expose(self, position: int, generation: int) -> None:
        """Note that what is computed from `position` on attends to donors' K/V that are no part of the prompt's spans.

        Sliding-window layers need it: an exact prefix may have lost the window before its end, which donors then give.

        Args:
            position: First position that attends to them.
            generation: Highest generation of these donors.
        """
        self._exposed += ((position, generation),)

    def recompute(self, runs: Iterable[tuple[int, int]]) -> None:
        """Note that a selection policy had tokens of `spans` computed and written over their copies.

        Args:
            runs: Ascending `(start, length)`, after those noted so far.
        """
        self._recomputed_runs += tuple(runs)

    def recompute_gap(self, num_tokens: int) -> None:
        """Note that a selection policy had `num_tokens` computed that a donor had and that were not copied."""
        self._recomputed_in_gaps += num_tokens

    def withdraw(self, start: int = 0) -> None:
        """Note that nothing copied lies from `start` on: the copy failed and the engine computes these positions.

        What the request goes on from is no copy of its own: `start` is its end, or it was computed, too.
        """
        self._cut(start)

    def heal(self, stop: int) -> None:
        """Note that every position before `stop`, the exact frontier, now has the K/V of a full prefill.

        They were computed again in order, attending to nothing but one another and the exact prefix. What follows keeps
        its class, a computed run, too.
        """
        self._healed_len = max(self._healed_len, stop)

    def healed(self) -> None:
        """Note that the frontier has passed everything: nothing approximate is left."""
        self._spans, self._exposed, self._healed_len = (), (), 0
        self._recomputed_runs, self._recomputed_in_gaps = (), 0

    def restart(self, kept_len: int) -> None:
        """Note that the request begins again and that its cache gave the first `kept_len` positions back.

        These keep their class; the positions after them are gone. A span that is cut counts as not recomputed, so that no
        report becomes better by a restart.
        """
        self._prefix_len = min(self._prefix_len, kept_len)
        self._cut(kept_len)

    def exact_len(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` positions have the K/V of a full prefill: they may be published."""
        firsts = [start for start, _, generation in self._sources() if generation]
        return min(num_tokens, max(self._healed_len, min([num_tokens, *firsts])))

    def own_len(self, num_tokens: int) -> int:
        """Return how many of the first `num_tokens` positions attended to no other text's K/V: others may go on from them."""
        firsts = [span.target_start for span in self._spans if span.fidelity is Fidelity.SUBSTITUTED]
        return min([num_tokens, *firsts])

    def generation_at(self, stop: int) -> int:
        """Return the highest generation before position `stop`: 0 where all is exact there. O(spans)."""
        return max((generation for start, _, generation in self._sources() if start < stop), default=0)

    def computed_runs(self, start: int, stop: int) -> Iterator[ComputedRun]:
        """Yield the computed runs of `[start, stop)` with their generations, as far as donors may be made of them.

        What attended to another text's K/V becomes no donor: the runs end before the first substituted span.

        Complexity: O(spans).
        """
        return computed_runs(self._sources(), start, self.own_len(stop))

    def check(self) -> None:
        """Verify the invariant; raises `CorruptCacheError`."""
        end = self._prefix_len
        for span in self._spans:
            if span.target_start < end or span.length <= 0:
                raise CorruptCacheError(f"span at {span.target_start} begins before {end} or is empty")
            end = span.target_start + span.length
        end = 0
        for start, length in self._recomputed_runs:
            if start < end or length <= 0 or not self._is_copied(start, start + length):
                raise CorruptCacheError(f"{length} tokens at {start} cannot have been computed over approximate copies")
            end = start + length

    def _is_copied(self, start: int, stop: int) -> bool:
        """Whether all of `[start, stop)` is approximate and was not computed by this request."""
        for span in self._spans:
            if span.target_start <= start < span.target_start + span.length and span.fidelity is not Fidelity.EXACT:
                start = span.target_start + span.length
        return start >= stop

    def _sources(self) -> list[tuple[int, int, int]]:
        """Ascending `(start, stop, generation)` of everything that was not computed, as it is in this request."""
        spans = [(span.target_start, span.target_start + span.length, copied_generation(span)) for span in self._spans]
        exposed = [(position, position, generation + 1) for position, generation in self._exposed]
        return sorted([*spans, *exposed])

    def _cut(self, stop: int) -> None:
        """Forget everything copied from `stop` on."""
        self._healed_len = min(self._healed_len, stop)
        kept = tuple(
            replace(span, length=min(span.length, stop - span.target_start))
            for span in self._spans
            if span.target_start < stop
        )
        if kept != self._spans:
            self._spans = kept
            self._recomputed_runs, self._recomputed_in_gaps = (), 0
        self._exposed = tuple((position, generation) for position, generation in self._exposed if position < stop)


def computed_runs(reused: Iterable[tuple[int, int, int]], start: int, stop: int) -> Iterator[ComputedRun]:
    """Yield the runs of `[start, stop)` that were computed and not copied.

    A token's generation is the highest one that it attended to, and 0 where all of that was exact.

    Args:
        reused: Ascending, disjoint `(start, stop, generation)` of what was not computed, some perhaps before `start`, some
            perhaps empty; 0 for what is exact.
        start: First position that counts.
        stop: First position after them.

    Complexity: O(reused).
    """
    attended = 0
    for first, last, generation in reused:
        if start < min(first, stop):
            yield ComputedRun(start, min(first, stop), attended)
        attended = max(attended, generation)
        start = max(start, last)
    if start < stop:
        yield ComputedRun(start, stop, attended)


def copied_generation(span: Match | SpanReport) -> int:
    """Return the generation of the K/V of a span as they are in the request: a copy to another place is one more."""
    if span.fidelity is Fidelity.EXACT:
        return 0
    return span.generation if span.fidelity is Fidelity.CONTINUED else span.generation + 1


def reused_span(match: Match, donor: Donor, *, tier: str = "", is_substituted: bool = False) -> SpanReport:
    """Describe a match with K/V from `donor`, which has them in `tier` (see `SpanReport`).

    Args:
        match: Verified token by token, unless `is_substituted`: the donor's tokens are others then.
        donor: Has the K/V.
        tier: Where it has them.
        is_substituted: Whether a semantic provider chose the donor.
    """
    return SpanReport(
        target_start=match.target_start,
        length=match.length,
        donor_id=match.donor_id,
        donor_start=match.donor_start,
        position_delta=match.target_start - donor.start_position - match.donor_start,
        fidelity=Fidelity.SUBSTITUTED if is_substituted else match.fidelity,
        generation=donor.generation,
        tier=tier,
    )
