"""Probe of an endpoint for a ZeroMQ publisher. A subscription alone waits for ever and says nothing."""

from __future__ import annotations

from kvgraft.errors import ConfigError
from kvgraft.events.publisher import load_zmq

PATIENCE_S = 5.0

_EVENTS_REMEDY = (
    "start the server with --kv-events-config (vLLM, SGLang) and announce_donors, "
    "and give the endpoint of its publisher"
)
_REPLAY_REMEDY = "give the replay_endpoint of its --kv-events-config, or leave replay= out"


def require_publisher(events: str, replay: str | None) -> None:
    """Refuse endpoints that do not publish KV events or send them again.

    Raises:
        ConfigError: No such socket listens there; names the remedy.
    """
    zmq = load_zmq()
    for endpoint, kind, what, remedy in (
        (events, zmq.SUB, "publishes KV events", _EVENTS_REMEDY),
        (replay, zmq.DEALER, "sends KV events again", _REPLAY_REMEDY),
    ):
        if endpoint is not None and not _answers(endpoint, kind, PATIENCE_S):
            raise ConfigError(f"no server {what} at {endpoint}; {remedy}{_where_vllm_listens(endpoint)}")


def _where_vllm_listens(endpoint: str) -> str:
    """Return what to write in vLLM's configuration; its publisher connects where the endpoint names a host."""
    scheme, _, address = endpoint.partition("://")
    if scheme != "tcp" or "*" in address:
        return ""
    port = address.rpartition(":")[2]
    return f"; vLLM connects to {endpoint} and listens at tcp://*:{port} or ipc://PATH: give it one of these"


def _answers(endpoint: str, kind: int, patience_s: float) -> bool:
    """Return whether the handshake of a socket of that kind succeeds."""
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
