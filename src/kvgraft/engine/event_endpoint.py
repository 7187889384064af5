"""The endpoint that the setting `kv_events` names: what it says, and the publisher that is opened for it."""

from __future__ import annotations

import json
import logging
from dataclasses import fields

from kvgraft.config import quoted
from kvgraft.errors import ConfigError
from kvgraft.events import PublisherConfig, ZmqEventPublisher

logger = logging.getLogger(__name__)


def opened_endpoint(kv_events: str) -> ZmqEventPublisher:
    """Open the endpoint that the setting names, and warn of one that other machines reach.

    Raises:
        ConfigError: The setting names something that a publisher does not have.
        IntegrationError: The endpoint cannot be opened.
        ImportError: The extra `router` is not installed.
    """
    config = publisher_config(kv_events)
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
