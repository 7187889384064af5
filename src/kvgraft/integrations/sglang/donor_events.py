"""Donors among SGLang's KV events, for routers that know donors (`kvgraft.reuse.donor_events`).

SGLang's own event has no field for the namespace of a donor: ours go into its batches as the maps that its events become
there, with the fields that these lack.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError
from kvgraft.events import as_map
from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.reuse.announcer import DonorAnnouncer
from kvgraft.reuse.donor_events import scope_of

if TYPE_CHECKING:
    from kvgraft.donors import DonorCatalogue
    from kvgraft.events import KVEvent
    from kvgraft.types import Namespace


class DonorEvents:
    """Keeps events of donors until SGLang publishes. Not thread-safe."""

    def __init__(self, catalogue: DonorCatalogue, fingerprint: str) -> None:
        """Announce all donors that come and go from now on."""
        self._events: list[dict[str, Any]] = []
        common = request_namespace(fingerprint, None, None, None)
        catalogue.watch(DonorAnnouncer(self._keep, common, client_scope, sends_fronts=True))

    def take(self) -> list[dict[str, Any]]:
        """Return events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _keep(self, event: KVEvent) -> None:
        self._events.append(as_map(event))


def client_scope(namespace: Namespace) -> str:
    """Return the scope by which routers know a request: of its salt alone, and a secret one if it has an `extra_key`."""
    extra_key, cache_salt = json.loads(namespace.tenant_salt)
    return scope_of(namespace.adapter, namespace.tenant_salt if extra_key is not None else cache_salt)


def require_events(*, are_published: bool) -> None:
    """Refuse to announce donors where no events are published.

    Raises:
        ConfigError: SGLang publishes none.
    """
    if not are_published:
        raise ConfigError(
            "announce_donors announces donors among SGLang's KV events; start it with "
            '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\''
        )
