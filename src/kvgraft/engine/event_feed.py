"""Events of the prefix cache, and of donors if asked for, sent to routers and indexes outside.

Pages are announced of the prefix cache, which holds exact K/V alone: a grafted request has pages before its first graft,
and none after it. Donors are marked so that no reader takes them for a prefix
(`reuse/donor_events.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.events import EventLog, ZmqEventPublisher


class EventFeed:
    """Events of one engine; without an endpoint nothing is recorded. Not thread-safe but for `close`.

    Attributes:
        log: Of the prefix cache; None without an endpoint.
    """

    def __init__(self, kv_events: str) -> None:
        """Open the endpoint that the setting `kv_events` names; empty for none.

        Raises:
            ConfigError: The setting names something that a publisher does not have.
            IntegrationError: The endpoint cannot be opened.
            ImportError: The extra `router` is not installed.
        """
        self._publisher: ZmqEventPublisher | None = None
        self.log: EventLog | None = None
        if kv_events:
            from kvgraft.engine.event_endpoint import opened_endpoint  # loaded where events are asked for
            from kvgraft.events import EventLog

            self._publisher = opened_endpoint(kv_events)
            self.log = EventLog()

    def flush(self) -> None:
        """Hand on what was recorded since the last call; it is encoded and sent by a thread of its own.

        Complexity: O(pages of the last event); never waits.
        """
        if not self.log:
            return
        events = self.log.take()
        if self._publisher is not None:  # closed: events are dropped, so that nothing piles up
            self._publisher.publish(events)

    def close(self) -> None:
        """Send what was recorded and close the endpoint."""
        if self._publisher is not None:
            self.flush()
            self._publisher.close()
            self._publisher = None
