"""Events of the prefix cache, and of donors if asked for, sent to routers and indexes outside.

Pages are announced of the prefix cache, which holds exact K/V alone: a grafted request has pages before its first graft,
and none after it. Donors are marked so that no reader takes them for a prefix
(`reuse/donor_events.py`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import fields

from kvgraft.config import quoted
from kvgraft.errors import ConfigError
from kvgraft.events import EventLog, PublisherConfig, ZmqEventPublisher

logger = logging.getLogger(__name__)


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
        self._publisher = _opened(publisher_config(kv_events)) if kv_events else None
        self.log = None if self._publisher is None else EventLog()

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


def _opened(config: PublisherConfig) -> ZmqEventPublisher:
    publisher = ZmqEventPublisher(config)
    if config.open_endpoints:
        logger.warning(
            "any client that reaches %s reads the tokens of all prompts and answers: kv_events has no keys; name "
            "tcp://127.0.0.1:PORT for this machine alone, or keep others out by a firewall",
            " and ".join(config.open_endpoints),
        )
    return publisher


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
