"""Announcements of donors that come and go, as KV events for routers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.reuse.donor_events import donor_removed, donor_stored, scope_of
from kvgraft.types import Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvgraft.donors import Donor
    from kvgraft.prefix import KVEvent


class DonorAnnouncer:
    """A `DonorWatcher` that hands on an event per donor; the engine publishes them in order with its own.

    Holds the donors that it has announced, for a reset, which ends all at once.
    """

    def __init__(
        self,
        send: Callable[[KVEvent], None],
        common: Namespace | None = None,
        scope: Callable[[Namespace], str] | None = None,
    ) -> None:
        """Prepare.

        Args:
            send: Takes each event, on the thread that changes the catalogue.
            common: Namespace without salt; donors that were read from a store under its key are announced as everyone's.
            scope: `scope_of` adapter and salt as clients name them, for engines that name them otherwise.
        """
        self._send = send
        self._scope = scope or (lambda namespace: scope_of(namespace.adapter, namespace.tenant_salt))
        self._scopes: dict[bytes, str] = {}
        if common is not None:
            self._scopes[common.key] = self._scope(common)
        self._announced: dict[int, Donor] = {}

    def donor_added(self, donor: Donor) -> None:
        """Announce a donor. Complexity: O(its tokens)."""
        self._announced[donor.donor_id] = donor
        self._send(donor_stored(donor, self._scope_of(donor)))

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
