"""The process around the app: socket, protocol timeouts, signals, orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import signal
import socket
import ssl
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvgraft.errors import ConfigError
from kvgraft.http.errors import BadRequestError
from kvgraft.http.json_io import json_bytes
from kvgraft.http.traceback_limit import limited_tracebacks

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from starlette.applications import Starlette

    from kvgraft.http.errors import APIError

logger = logging.getLogger(__name__)

HEADER_TIMEOUT_S = 20.0
"""A connection that does not send a whole request head in this time is closed."""
KEEP_ALIVE_S = 30
_FLUSH_S = 5
"""Seconds that connections may take to receive what was written to them before the process ends."""


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not listen yet, so that a port in use is known before a model is loaded.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        with contextlib.ExitStack() as on_error:
            on_error.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            on_error.pop_all()
    except (OSError, UnicodeError) as error:
        raise _cannot_listen(host, port, error) from error
    return listener


def is_open_to_others(listener: socket.socket) -> bool:
    """Return whether other machines can connect to a bound socket."""
    return not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


@dataclass(frozen=True, slots=True)
class Certificate:
    """Certificate and key of a server that speaks HTTPS.

    Attributes:
        certfile: PEM file of the certificate, and of those that signed it.
        keyfile: PEM file of its private key; empty if that is in `certfile`.
    """

    certfile: str
    keyfile: str = ""


def certificate(certfile: str, keyfile: str) -> Certificate | None:
    """Return what two settings say, checked before a model is loaded; None if they say nothing.

    Raises:
        ConfigError: A file cannot be read, is no PEM, or the key is another certificate's or encrypted.
    """
    if not certfile:
        if keyfile:
            raise ConfigError("ssl_keyfile goes with ssl_certfile; set both, or neither for HTTP")
        return None
    for name, path in (("ssl_certfile", certfile), ("ssl_keyfile", keyfile)):
        if path and not os.path.isfile(path):
            raise ConfigError(f"{name} is no file: {path}")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile or None, password=_no_password)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise ConfigError(
            f"ssl_certfile and ssl_keyfile cannot be used: {reason}; give PEM files of a certificate and its own key"
        ) from error
    return Certificate(certfile, keyfile)


def _no_password() -> str:
    raise ConfigError(
        "the key of ssl_keyfile is encrypted; decrypt it with `openssl pkey`, and let only the server read it"
    )


def serve(
    app: Starlette,
    listener: socket.socket,
    *,
    grace_s: float,
    on_ready: Callable[[str], None],
    tls: Certificate | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once.

    Args:
        app: What `create_app` made.
        listener: What `bind` made; closed when this returns.
        grace_s: Seconds that running requests may go on after the first signal.
        on_ready: Called with the URL as soon as requests are accepted.
        tls: What to speak HTTPS with; None speaks HTTP.
    """
    host, port = listener.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = f"{'http' if tls is None else 'https'}://{place}"
    try:
        with limited_tracebacks():
            GracefulServer(app, grace_s, lambda: on_ready(url), tls).run(sockets=[listener])
    except OSError as error:
        raise _cannot_listen(host, port, error) from error


class GracefulServer(uvicorn.Server):
    """Drains before it stops: new requests get 503, running ones finish or fail within the grace time."""

    def __init__(
        self, app: Starlette, grace_s: float, on_ready: Callable[[], None], tls: Certificate | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=TimedH11Protocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
            ssl_certfile=None if tls is None else tls.certfile,
            ssl_keyfile=(None if tls is None else tls.keyfile) or None,
        )
        super().__init__(config)
        self._app = app
        self._grace_s = grace_s
        self._on_ready = on_ready
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain_task: asyncio.Task[None] | None = None
        self._stopping = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Run; see `uvicorn.Server.serve`."""
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Open the port, then print the line that says where the server listens."""
        await super().startup(sockets)
        self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second. uvicorn does not see it: it would raise it again at the end."""
        if self._stopping or self._loop is None:
            os._exit(128 + sig)
        self._stopping = True
        self._loop.call_soon_threadsafe(self._start_draining, signal.Signals(sig).name)

    def _start_draining(self, name: str) -> None:
        logger.info("%s: no more requests are taken; running ones may go on for %.0f s", name, self._grace_s)
        self._drain_task = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        try:
            await self._app.state.context.close(self._grace_s)
        except Exception:
            logger.exception("the engine did not close cleanly")
        finally:
            self.should_exit = True


class TimedH11Protocol(H11Protocol):
    """Closes connections that are slow to send a request's head, and answers clients that close their half.

    uvicorn itself waits for ever for the former, and leaves the latter without a word.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to count how long the client takes to send the head of its request."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Stop the clock while a request is handled, start it at the first bytes of the next."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_clock()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEADER_TIMEOUT_S, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the count: no client is left to wait for."""
        self._stop_clock()
        super().connection_lost(exc)

    def eof_received(self) -> None:
        """Cancel the request of a client that sends no more: it has left, or looks like one that has.

        If it has not, it reads why no answer comes.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            return
        if not cycle.response_started:
            self.transport.write(_HALF_CLOSED)
        cycle.disconnected = True  # nothing else may be written after it
        cycle.message_event.set()

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _raw_response(error: APIError) -> bytes:
    """An error as bytes, for where no app answers."""
    body = json_bytes(error.payload())
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    head = f"{status}content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return head.encode("ascii") + body


_HALF_CLOSED = _raw_response(
    BadRequestError(
        "the connection was closed for sending, so the request was cancelled; keep the connection open until the answer has "
        "come",
        code="client_closed",
    )
)


def _cannot_listen(host: str, port: int, error: Exception) -> ConfigError:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    remedy = "choose another --port" if getattr(error, "errno", None) == errno.EADDRINUSE else "check --host and --port"
    return ConfigError(f"cannot listen on {host} port {port}: {reason}; {remedy}")
