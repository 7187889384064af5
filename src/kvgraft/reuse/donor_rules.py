"""Rules of what becomes a donor: text that is long and exact enough, that others do not have, and what it replaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.donors import DonorQuery

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor, DonorCatalogue
    from kvgraft.reuse.lineage import ComputedRun, Lineage
    from kvgraft.reuse.lookup import DonorFinder
    from kvgraft.types import KeyedNamespace, Match, Namespace


class DonorRules:
    """The rules of one catalogue. Changes nothing: the keeper of the K/V carries them out."""

    def __init__(
        self, catalogue: DonorCatalogue, *, min_run: int, max_generation: int, finder: DonorFinder | None = None
    ) -> None:
        """Take the rules.

        Args:
            catalogue: Of the donors.
            min_run: Shortest text that becomes a donor.
            max_generation: Highest generation of a donor.
            finder: Finds donors with K/V that are there, where the catalogue alone does not know it.
        """
        self._catalogue = catalogue
        self._min_run = min_run
        self._max_generation = max_generation
        self._finder = catalogue if finder is None else finder

    def admits(self, num_tokens: int, generation: int) -> bool:
        """Return whether a text is long enough and close enough to exact."""
        return num_tokens >= self._min_run and generation <= self._max_generation

    def runs(self, lineage: Lineage, start: int, stop: int) -> Iterator[ComputedRun]:
        """Yield what a request computed in `[start, stop)` and what is admitted. Copied text never is."""
        return (run for run in lineage.computed_runs(start, stop) if self.admits(run.stop - run.start, run.generation))

    def is_known(
        self, namespace: Namespace | KeyedNamespace, token_ids: NDArray[np.integer[Any]], generation: int
    ) -> bool:
        """Return whether resident donors of at most `generation` have the text; see `covers`."""
        known = self._finder.find(DonorQuery(namespace, token_ids, max_generation=generation, with_stored=False))
        return self.covers(known, len(token_ids), generation)

    def covers(self, matches: Iterable[Match], num_tokens: int, generation: int) -> bool:
        """Return whether donors of at most `generation` have a text, all but less than the shortest run.

        Args:
            matches: Of the text, disjoint.
            num_tokens: Its length.
            generation: A donor of a higher one does not count: the text is the better donor then.
        """
        return num_tokens - sum(match.length for match in self.as_good(matches, generation)) < self._min_run

    def as_good(self, matches: Iterable[Match], generation: int) -> list[Match]:
        """Keep matches with donors of at most `generation`."""
        found = ((match, self._catalogue.get(match.donor_id)) for match in matches)
        return [match for match, donor in found if donor is not None and donor.generation <= generation]

    def superseded(self, matches: Sequence[Match]) -> list[Donor]:
        """Return the unpinned donors with which a text begins that is about to be registered from position 0 on."""
        donors = []
        for match in matches:
            donor = self._catalogue.get(match.donor_id)
            if donor is None or self._catalogue.is_pinned(match.donor_id):
                continue
            if match.target_start == donor.start_position == 0 and match.length == donor.num_tokens:
                donors.append(donor)
        return donors

    def replaced(
        self, namespace: Namespace | KeyedNamespace, token_ids: NDArray[np.integer[Any]], generation: int
    ) -> list[Donor]:
        """Return unpinned donors of a higher generation that stand in a text in full; the text replaces them.

        To be called before the text of `generation` is registered.
        """
        if generation >= self._max_generation:
            return []
        inside = self._catalogue.inside(namespace, token_ids, min_generation=generation + 1)
        return [donor for donor in inside if not self._catalogue.is_pinned(donor.donor_id)]
