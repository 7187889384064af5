"""Announcements of donors that come and go, as KV events for routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.reuse.donor_events import donor_removed, donor_stored, scope_of
from kvgraft.reuse.sent_fronts import SentFronts
from kvgraft.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from kvgraft.donors import Donor
    from kvgraft.events import KVEvent


class DonorAnnouncer:
    """A `DonorWatcher` that hands on an event per donor; the engine publishes them in order with its own.

    Holds the donors that it has announced, for a reset, which ends all at once.
    """

    def __init__(
        self,
        send: Callable[[KVEvent], None],
        common: Namespace | None = None,
        scope: Callable[[Namespace], str] | None = None,
        *,
        sends_fronts: bool = False,
    ) -> None:
        """Prepare.

        Args:
            send: Takes each event, on the thread that changes the catalogue.
            common: Namespace without salt; donors that were read from a store under its key are announced as everyone's.
            scope: `scope_of` adapter and salt as clients name them, for engines that name them otherwise.
            sends_fronts: Send the tokens before donors that were computed after copies, each of them once, so that readers
                can have the whole computed again (`kvgraft heal`). Of adapters and salts nobody can, and nothing is sent.
        """
        self._send = send
        self._scope = scope or (lambda namespace: scope_of(namespace.adapter, namespace.tenant_salt))
        self._scopes: dict[bytes, str] = {}
        if common is not None:
            self._scopes[common.key] = self._scope(common)
        self._announced: dict[int, Donor] = {}
        self._sent = SentFronts() if sends_fronts else None

    def donor_added(self, donor: Donor, before: NDArray[np.integer] | None) -> None:
        """Announce a donor. Complexity: O(its tokens), and of one that was computed after copies those before it."""
        self._announced[donor.donor_id] = donor
        scope, goes_on = self._scope_of(donor), donor.generation > 0 and before is not None
        unsent = None
        if self._sent is not None and goes_on and before is not None and scope == scope_of():
            unsent = self._sent.send(donor.namespace.key, before, donor.token_ids)
        self._send(donor_stored(donor, scope, goes_on=goes_on, before=unsent))

    def donor_removed(self, donor: Donor) -> None:
        """Announce that a donor is gone."""
        if self._announced.pop(donor.donor_id, None) is not None:
            self._send(donor_removed(donor))

    def donors_reset(self) -> None:
        """Announce that all donors are gone."""
        for donor in list(self._announced.values()):
            self.donor_removed(donor)

    def _scope_of(self, donor: Donor) -> str | None:
        """Return the scope of a donor's namespace; None where that is known by its key alone."""
        namespace = donor.namespace
        return self._scope(namespace) if isinstance(namespace, Namespace) else self._scopes.get(namespace.key)
