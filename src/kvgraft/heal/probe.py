"""Whether somebody who speaks ZeroMQ publishes at an endpoint. A subscription alone waits for ever and says nothing."""

from __future__ import annotations

from kvgraft.errors import ConfigError
from kvgraft.prefix.events.publisher import load_zmq

PATIENCE_S = 5.0

_EVENTS_REMEDY = (
    "start the server with --kv-events-config (vLLM, SGLang) and announce_donors, "
    "and give the endpoint of its publisher"
)
_REPLAY_REMEDY = "give the replay_endpoint of its --kv-events-config, or leave replay= out"


def require_publisher(events: str, replay: str | None) -> None:
    """Refuse endpoints at which nobody publishes KV events or sends them again.

    Raises:
        ConfigError: Nobody listens there, or somebody who is none; names the remedy.
    """
    zmq = load_zmq()
    for endpoint, kind, what, remedy in (
        (events, zmq.SUB, "publishes KV events", _EVENTS_REMEDY),
        (replay, zmq.DEALER, "sends KV events again", _REPLAY_REMEDY),
    ):
        if endpoint is not None and not _answers(endpoint, kind, PATIENCE_S):
            raise ConfigError(f"nobody {what} at {endpoint}; {remedy}")


def _answers(endpoint: str, kind: int, patience_s: float) -> bool:
    """Whether a socket of that kind comes to terms with what listens there."""
    zmq = load_zmq()
    socket = zmq.Context.instance().socket(kind)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    try:
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot connect to {endpoint}: {error}; write it as tcp://HOST:PORT") from error
        return bool(monitor.poll(patience_s * 1e3))
    finally:
        socket.disable_monitor()
        monitor.close(linger=0)
        socket.close(linger=0)
