"""Donors that resemble a prompt, for the matcher to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.types import DonorId

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.semantic.discovery import Discovery
    from kvgraft.types import Namespace

_MOST_DONORS = 8
"""Donors per proposal; each costs the matcher what fingerprinting its text takes."""


class DonorProposer:
    """Indexes donors as they come and go (`kvgraft.donors.DonorWatcher`) and names those that resemble a prompt.

    A proposal is no match: the catalogue compares tokens. It brings donors to the matcher that its indexes do not lead to.
    """

    def __init__(
        self, discovery: Discovery, *, max_donors: int = _MOST_DONORS, min_similarity: float | None = None
    ) -> None:
        """Propose up to `max_donors`, from an index that only this object fills.

        Args:
            discovery: Embeds and searches.
            max_donors: Most donors per proposal; each costs the matcher what fingerprinting its text takes.
            min_similarity: Least cosine; None for what the embedder calls worth comparing.
        """
        self.discovery = discovery
        self._max_donors = max_donors
        least = discovery.embedder.least_similarity
        self._min_similarity = least if min_similarity is None else min_similarity

    def propose(self, namespace: Namespace, token_ids: NDArray[np.integer[Any]]) -> tuple[DonorId, ...]:
        """Name donors that resemble a prompt, nearest first; none if that cannot be said yet."""
        found = self.discovery.ready(namespace, token_ids, k=self._max_donors, min_similarity=self._min_similarity)
        return tuple(DonorId(each.key) for each in found or () if isinstance(each.key, int))

    def counts(self) -> dict[str, int]:
        """Counters of the texts of donors and prompts."""
        counters = self.discovery.counters
        return {"embedded": counters.embedded, "dropped": counters.dropped, "errors": counters.errors}

    def donor_added(self, donor: Donor, before: object) -> None:
        """Index a donor, when the thread comes to it."""
        self.discovery.add(donor.namespace, donor.donor_id, donor.token_ids)

    def donor_removed(self, donor: Donor) -> None:
        """Name a donor no more."""
        self.discovery.remove(donor.namespace, donor.donor_id)

    def donors_reset(self) -> None:
        """Name none any more, neither those that are being embedded."""
        self.discovery.reset()
