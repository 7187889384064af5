"""Donors among SGLang's KV events, for routers that know donors; others take none of them for a prefix.

How they tell them apart is said in `kvgraft.prefix.events.donors`. SGLang's own event has no place for whose a donor is: ours
go into its batches as the maps that its events become there, with what these lack.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError
from kvgraft.integrations.sglang.planning.planner import request_namespace
from kvgraft.prefix import as_map, scope_of
from kvgraft.reuse import DonorAnnouncer

if TYPE_CHECKING:
    from kvgraft.donors import DonorCatalogue
    from kvgraft.prefix import KVEvent
    from kvgraft.types import Namespace


class DonorEvents:
    """Keeps what is to be told of donors until SGLang publishes. Not thread-safe."""

    def __init__(self, catalogue: DonorCatalogue, fingerprint: str) -> None:
        """Tell of all donors that come and go from now on."""
        self._untold: list[dict[str, Any]] = []
        common = request_namespace(fingerprint, None, None, None)
        catalogue.watch(DonorAnnouncer(self._tell, common, client_scope))

    def take(self) -> list[dict[str, Any]]:
        """Return events since the last call, in order."""
        untold, self._untold = self._untold, []
        return untold

    def _tell(self, event: KVEvent) -> None:
        self._untold.append(as_map(event))


def client_scope(namespace: Namespace) -> str:
    """The scope of a namespace as routers know it of a request: its salt alone. Nobody's, where it has an `extra_key`."""
    extra_key, cache_salt = json.loads(namespace.tenant_salt)
    return scope_of(namespace.adapter, namespace.tenant_salt if extra_key is not None else cache_salt)


def require_events(*, are_published: bool) -> None:
    """Refuse to announce donors where nobody publishes events.

    Raises:
        ConfigError: SGLang publishes none.
    """
    if not are_published:
        raise ConfigError(
            "announce_donors tells of donors among SGLang's KV events; start it with "
            '--kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\''
        )
