"""What the prefix cache stores and removes, sent to routers and indexes outside, and if asked for which donors there are.

What is told of as pages is what the prefix cache holds, and it holds exact K/V alone: a grafted request has pages in
front of its first graft, and none behind. Donors are marked so that nobody takes them for a prefix
(`prefix/events/donors.py`).
"""

from __future__ import annotations

import json
from dataclasses import fields

from kvgraft.config import quoted
from kvgraft.errors import ConfigError
from kvgraft.prefix import EventLog, PublisherConfig, ZmqEventPublisher


class EventFeed:
    """Events of one engine; without an endpoint nothing is recorded. Not thread-safe but for `close`.

    Attributes:
        log: Where the prefix cache records; None where nobody listens.
    """

    def __init__(self, kv_events: str) -> None:
        """Open the endpoint that the setting `kv_events` names; empty for none.

        Raises:
            ConfigError: The setting names something that a publisher does not have.
            IntegrationError: The endpoint cannot be opened.
            ImportError: The extra `router` is not installed.
        """
        self._publisher = ZmqEventPublisher(publisher_config(kv_events)) if kv_events else None
        self.log = None if self._publisher is None else EventLog()

    def flush(self) -> None:
        """Hand on what was recorded since the last call; it is encoded and sent by a thread of its own.

        Complexity: O(pages of the last event); never waits.
        """
        if not self.log:
            return
        events = self.log.take()
        if self._publisher is not None:  # closed: nobody listens, and nothing piles up
            self._publisher.publish(events)

    def close(self) -> None:
        """Send what was recorded and close the endpoint."""
        if self._publisher is not None:
            self.flush()
            self._publisher.close()
            self._publisher = None


def publisher_config(kv_events: str) -> PublisherConfig:
    """Return what `kv_events` says: an endpoint, or a JSON object with fields of `PublisherConfig`.

    Raises:
        ConfigError: It is no JSON object of such fields; names what there is.
    """
    if not kv_events.startswith("{"):
        return PublisherConfig(kv_events)
    known = {field.name: field for field in fields(PublisherConfig)}
    try:
        values = json.loads(kv_events)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"kv_events is no valid JSON: {error}") from error
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"kv_events has no field {quoted(name)}; it has {', '.join(known)}")
        default = known[name].default
        kind = str if default is None else type(default)
        if type(value) is not kind and value is not default:
            raise ConfigError(f"{name} of kv_events must be of type {kind.__name__}, not {quoted(value)}")
    return PublisherConfig(**values)
