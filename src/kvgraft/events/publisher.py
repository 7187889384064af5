"""Publishes KV events over ZMQ as vLLM and SGLang do, and subscribes to any of the three. Needs the extra `router`.

A message is `[topic, sequence number, payload]`. A reader that sees a gap asks the replay endpoint for what it missed.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.events.event import AllBlocksCleared
from kvgraft.events.wire import SEQUENCE_BYTES, EventBatch, decode_batch, encode_batch, require_msgpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from kvgraft.events.event import KVEvent

logger = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
_POLL_MS = 20
_LINGER_MS = 500


@dataclass(frozen=True, slots=True)
class PublisherConfig:
    """Where and how events are published; names and defaults are those of vLLM's `--kv-events-config`."""

    endpoint: str = "tcp://*:5557"
    """Bound if it names all interfaces (`tcp://*:5557`), this machine's own (`tcp://127.0.0.1:5557`) or a path (`ipc://`,
    `inproc://`), else connected."""
    replay_endpoint: str | None = None
    """Answers readers that missed something; None answers none."""
    topic: str = ""
    """Prefix by which readers subscribe."""
    buffer_steps: int = 10_000
    """Batches kept for replay, where there is a replay endpoint."""
    hwm: int = 100_000
    """Messages that ZMQ holds for a slow reader."""
    max_queue_size: int = 100_000
    """Batches that wait to be sent; more are dropped and counted."""
    dp_rank: int = 0
    as_arrays: bool = False
    """Write events as arrays, for readers of older vLLM."""

    def __post_init__(self) -> None:
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def open_endpoints(self) -> list[str]:
        """Endpoints that other machines can read from."""
        given = (self.endpoint, self.replay_endpoint or "")
        return [each for each in given if each.startswith("tcp://") and _is_bound(each) and not _is_local(each)]


class ZmqEventPublisher:
    """Sends batches from a thread of its own; `publish` never waits. `close` sends what is queued.

    A batch has its number from the moment it is published: readers see a gap where one was dropped or could not be sent,
    at the latest when the queue is empty.

    Attributes:
        num_dropped: Batches that were dropped because the queue was full.
        num_failed: Batches that could not be sent.
    """

    def __init__(self, config: PublisherConfig | None = None) -> None:
        """Open the sockets.

        Raises:
            IntegrationError: An endpoint cannot be opened.
            ImportError: pyzmq or msgspec is not installed.
        """
        self.config = config or PublisherConfig()
        self.num_dropped = self.num_failed = 0
        self._queue: queue.Queue[tuple[int, EventBatch] | None] = queue.Queue(self.config.max_queue_size)
        self._numbering = threading.Lock()
        self._num_published = 0
        self._has_lost = False
        kept = 0 if self.config.replay_endpoint is None else self.config.buffer_steps
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._zmq = load_zmq()
        require_msgpack()
        context = self._zmq.Context.instance()
        self._publisher = _open(context, self._zmq.PUB, self.config.endpoint, self.config.hwm)
        replay = self.config.replay_endpoint
        try:
            self._replay = None if replay is None else _open(context, self._zmq.ROUTER, replay, self.config.hwm)
        except IntegrationError:
            self._publisher.close(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kvgraft-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue the events of one step; nothing if there are none."""
        if events:
            self._enqueue(tuple(events))

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued and close the sockets."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            logger.warning("KV event publisher does not keep up; what is queued is lost")
        self._thread.join(timeout_s)

    def _enqueue(self, events: tuple[KVEvent, ...]) -> None:
        with self._numbering:
            number, self._num_published = self._num_published, self._num_published + 1
            try:
                self._queue.put_nowait((number, EventBatch(time.time(), events, self.config.dp_rank)))
            except queue.Full:
                self.num_dropped += 1
                self._has_lost = True
                if self.num_dropped == 1:
                    logger.warning("KV events are dropped: %d batches wait to be sent", self.config.max_queue_size)

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                goes_on = self._send_next()
                self._answer_replays()
        finally:
            for socket in (self._publisher, self._replay):
                if socket is not None:
                    socket.close(linger=_LINGER_MS)

    def _send_next(self) -> bool:
        """Send one batch if there is one soon; False at the end."""
        try:
            item = self._queue.get(timeout=_POLL_MS / 1e3)
        except queue.Empty:
            if self._has_lost:
                self._has_lost = False
                self._enqueue(())  # says nothing, but its number shows the gap before it
            return True
        if item is None:
            return False
        try:
            self._send(*item)
        except Exception:
            self.num_failed += 1
            self._has_lost = True
            if self.num_failed == 1:
                logger.exception("a batch of KV events cannot be sent; readers see a gap")
        return True

    def _send(self, number: int, batch: EventBatch) -> None:
        payload = encode_batch(batch, as_arrays=self.config.as_arrays)
        self._publisher.send_multipart((self.config.topic.encode(), number.to_bytes(SEQUENCE_BYTES, "big"), payload))
        self._sent.append((number, payload))

    def _answer_replays(self) -> None:
        """Answer everyone who has asked."""
        try:
            while self._replay is not None and self._replay.poll(0):
                self._answer_replay(self._replay)
        except Exception:
            logger.exception("a replay of KV events failed; the next ones are tried")

    def _answer_replay(self, socket: Any) -> None:  # noqa: ANN401 (pyzmq sockets)
        """Send an asker what it missed, as far as it is kept, and the end mark."""
        frames = socket.recv_multipart()
        if len(frames) != 3:
            logger.warning("replay request of %d frames ignored; three are expected", len(frames))
            return
        client, _, first = frames
        start = int.from_bytes(first, "big")
        for number, payload in self._sent:
            if number >= start:
                socket.send_multipart((client, b"", number.to_bytes(SEQUENCE_BYTES, "big"), payload))
        socket.send_multipart((client, b"", END_OF_REPLAY, b""))


class ZmqEventSubscriber:
    """Reads batches of a publisher in order, each once; asks for what it missed where there is a replay endpoint.

    A publisher that was started anew counts from 0 again. It is known by the time of its batch, which a repeated one does not
    have; a batch of one `AllBlocksCleared` comes first then, because nothing that was announced before is stored.

    Attributes:
        num_missed: Batches that could not be had any more.
        num_restarts: How often another process was found at the endpoint.
    """

    def __init__(
        self, endpoint: str, *, topic: str = "", replay_endpoint: str | None = None, hwm: int = 100_000
    ) -> None:
        self.num_missed = self.num_restarts = 0
        self._zmq = load_zmq()
        self._context = self._zmq.Context.instance()
        self._replay_endpoint = replay_endpoint
        self._next: int | None = None if replay_endpoint is None else 0
        self._last_time = -math.inf
        self._socket = self._context.socket(self._zmq.SUB)
        self._socket.set_hwm(hwm)
        self._socket.setsockopt(self._zmq.SUBSCRIBE, topic.encode())
        self._socket.connect(endpoint)

    def receive(self, timeout_s: float = 1.0) -> list[EventBatch]:
        """Return the next batches, missed ones included; empty if nothing comes in time.

        Raises:
            IntegrationError: A message is no batch of KV events.
        """
        if not self._socket.poll(int(timeout_s * 1e3)):
            return []
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            raise IntegrationError(f"{len(frames)} frames are no KV event message; expected topic, sequence, payload")
        number, batch = int.from_bytes(frames[1], "big"), decode_batch(frames[2])
        batches: list[EventBatch] = []
        if self._next is not None and number < self._next:
            if batch.timestamp <= self._last_time:
                return []
            self.num_restarts += 1
            self._next = 0
            batches.append(EventBatch(batch.timestamp, (AllBlocksCleared(),), batch.dp_rank))
        batches += self._missed(number)
        self._next, self._last_time = number + 1, batch.timestamp
        return [*batches, batch]

    def close(self) -> None:
        """Close the socket; what was not received by then is lost."""
        self._socket.close(linger=0)

    def _missed(self, number: int) -> Iterator[EventBatch]:
        """Batches between the last one received and `number`, from the replay endpoint."""
        if self._next is None or self._next == number:
            return
        found = 0
        if self._replay_endpoint is not None:
            for replayed, payload in self._replayed(self._replay_endpoint, self._next):
                if self._next <= replayed < number:
                    found += 1
                    yield decode_batch(payload)
        self.num_missed += number - self._next - found

    def _replayed(self, endpoint: str, start: int) -> Iterator[tuple[int, bytes]]:
        socket = self._context.socket(self._zmq.DEALER)
        try:
            socket.connect(endpoint)
            socket.send_multipart((b"", start.to_bytes(SEQUENCE_BYTES, "big")))
            while socket.poll(1000):
                *_, number, payload = socket.recv_multipart()  # vLLM puts the topic in front
                if number == END_OF_REPLAY:
                    return
                yield int.from_bytes(number, "big"), payload
            logger.warning("replay endpoint %s does not answer", endpoint)
        finally:
            socket.close(linger=0)


def _is_bound(endpoint: str) -> bool:
    """Return whether a publisher waits there for readers; elsewhere it connects to a reader that waits."""
    return "*" in endpoint or "::" in endpoint or _is_local(endpoint) or endpoint.startswith(("ipc://", "inproc://"))


def _is_local(endpoint: str) -> bool:
    return endpoint.startswith(("tcp://127.", "tcp://[::1]"))


def _open(context: Any, kind: int, endpoint: str, hwm: int) -> Any:  # noqa: ANN401 (pyzmq sockets)
    socket = context.socket(kind)
    socket.set_hwm(hwm)
    try:
        if _is_bound(endpoint):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except Exception as error:
        socket.close(linger=0)
        raise IntegrationError(f"cannot open {endpoint!r} for KV events: {error}; choose a free endpoint") from error
    return socket


def load_zmq() -> ModuleType:
    """Return pyzmq, or raise `ImportError` that names the extra."""
    try:
        import zmq
    except ImportError as error:
        raise ImportError("KV events over ZMQ need pyzmq: pip install 'kvgraft[router]'", name="zmq") from error
    return zmq
