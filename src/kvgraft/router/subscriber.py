"""Reads the KV events of all workers in one thread and keeps the directory true. Needs the extra `router`.

Per worker a SUB socket, a monitor that reports when its connection is made anew, and for the time of a replay a DEALER
socket.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.events import decode_batch
from kvgraft.events.publisher import END_OF_REPLAY, load_zmq
from kvgraft.events.wire import SEQUENCE_BYTES, require_msgpack
from kvgraft.router.sequence import BatchSequence, Progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvgraft.events import KVEvent
    from kvgraft.router.worker import WorkerSpec

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 2.0
"""A replay endpoint that says nothing for so long is not waited for."""
RETRY_S = 5.0
"""So long after a replay that was given up everything is asked for once more; then twice as long, and so on."""
_LONGEST_RETRY_S = 300.0
SETTLING_S = 1.0
"""So long after a connection was made it is asked once more for what was published before the subscription took effect."""
ABANDONED_S = 30.0
"""Seconds for which a worker's events are believed without a connection to it."""
_REMEDY = "give the host and port to connect to, where the worker's own settings may say tcp://*:PORT"
_POLL_MS = 100
_HWM = 100_000
MOST_MESSAGE_BYTES = 16 << 20
"""Longest frame that is taken: more than three million tokens. A longer one ends its connection, and is a gap, then."""
_BATCHES_AT_ONCE = 64
"""Batches of one worker that are taken before others have their turn."""


class Listener(Protocol):
    """Hears what workers say, on the reader's thread; `Directory` is one."""

    def apply(self, worker: str, events: Sequence[KVEvent], *, forget: bool = False) -> None:
        """Take over what a worker says; with `forget`, instead of all that was known. Must not raise."""


class WorkerStream:
    """The sockets of one worker. Lives on the reader's thread."""

    def __init__(self, spec: WorkerSpec, listener: Listener, zmq: Any) -> None:  # noqa: ANN401 - a module
        """Subscribe.

        Raises:
            ConfigError: The endpoint cannot be used.
        """
        assert spec.events is not None
        self.sequence = BatchSequence(can_replay=spec.replay is not None)
        self.num_unreadable = 0
        self._spec = spec
        self._listener = listener
        self._zmq = zmq
        self._context = zmq.Context.instance()
        self._replay: Any = None
        self._patience_until = 0.0
        self._settled_at = self._abandoned_at = self._retry_at = math.inf
        self._retry_s = RETRY_S
        self._subscriber: Any
        self._monitor: Any
        self._check_replay()
        self._subscribe()

    def sockets(self) -> list[Any]:
        """Return sockets that may have something to read."""
        return [socket for socket in (self._subscriber, self._monitor, self._replay) if socket is not None]

    def read(self) -> None:
        """Take what is there, some of it if it is much."""
        if self._replay is not None:
            self._read_replay()
        self._read_monitor()
        for _ in range(_BATCHES_AT_ONCE):
            if not self._subscriber.poll(0):
                break
            frames = self._subscriber.recv_multipart()
            # A new connection is reported before its first message, and has to be handled before it, too.
            self._read_monitor()
            self._read_batch(frames)
        if time.monotonic() > self._settled_at:
            self._settled_at = math.inf
            self._follow(self.sequence.settled())
        if time.monotonic() > self._retry_at and not self.sequence.is_waiting:
            self._retry_at = math.inf
            self._follow(self.sequence.retried())
        if time.monotonic() > self._abandoned_at:
            self._abandoned_at = math.inf
            self._end_replay()
            self._follow(self.sequence.abandoned())

    def close(self) -> None:
        """Close all sockets."""
        self._end_replay()
        self._close_subscriber()

    def _check_replay(self) -> None:
        """Refuse an endpoint of replays that cannot be connected to; it is used later, on the thread of the reader."""
        if self._spec.replay is None:
            return
        with self._context.socket(self._zmq.DEALER) as replay:
            replay.set(self._zmq.LINGER, 0)
            try:
                replay.connect(self._spec.replay)
            except self._zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot ask {self._spec.replay!r} of worker {self._spec.name} for replays: {error}; {_REMEDY}"
                ) from error

    def _subscribe(self) -> None:
        zmq, spec = self._zmq, self._spec
        self._subscriber = self._context.socket(zmq.SUB)
        self._subscriber.set_hwm(_HWM)
        self._subscriber.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, spec.topic.encode())
        self._monitor = self._subscriber.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        try:
            self._subscriber.connect(spec.events)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"cannot listen to {spec.events!r} of worker {spec.name}: {error}; {_REMEDY}") from error

    def _close_subscriber(self) -> None:
        self._subscriber.disable_monitor()
        self._monitor.close(linger=0)
        self._subscriber.close(linger=0)

    def _read_monitor(self) -> None:
        while self._monitor.poll(0):
            event = int.from_bytes(self._monitor.recv_multipart()[0][:2], "little")
            if event == self._zmq.EVENT_CONNECTED:
                self._settled_at, self._abandoned_at = time.monotonic() + SETTLING_S, math.inf
                self._follow(self.sequence.connected())
            else:
                logger.info("the event stream of worker %s has broken off", self._spec.name)
                self._close_subscriber()  # zmq connects again by itself, but not after a frame that is too long
                self._subscribe()
                self._abandoned_at = time.monotonic() + ABANDONED_S
                self._follow(self.sequence.disconnected())

    def _read_batch(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            self._unreadable("a message has no topic, sequence number and payload")
            return
        self._take(frames[1], frames[2], replayed=False)

    def _take(self, number: bytes, payload: bytes, *, replayed: bool) -> None:
        take = self.sequence.replayed if replayed else self.sequence.received
        try:
            batch = decode_batch(payload)
        except IntegrationError as error:
            self._unreadable(str(error))  # a gap, then
            return
        self._follow(take(int.from_bytes(number, "big"), batch))

    def _unreadable(self, reason: str) -> None:
        self.num_unreadable += 1
        if self.num_unreadable == 1:
            logger.warning("worker %s publishes what is no KV event: %s", self._spec.name, reason)

    def _follow(self, progress: Progress) -> None:
        if progress.forget:
            logger.info("what is known of worker %s is learned anew", self._spec.name)
        if progress.forget or progress.events:
            self._listener.apply(self._spec.name, progress.events, forget=progress.forget)
        if progress.ask_from is not None:
            self._ask(progress.ask_from)

    def _ask(self, first: int) -> None:
        self._end_replay()
        self._replay = self._context.socket(self._zmq.DEALER)
        self._replay.setsockopt(self._zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
        self._replay.connect(self._spec.replay)
        self._replay.send_multipart((b"", first.to_bytes(SEQUENCE_BYTES, "big")))
        self._patience_until = time.monotonic() + REPLAY_TIMEOUT_S

    def _read_replay(self) -> None:
        """Take what was sent again; other engines put the topic before the number."""
        replay = self._replay
        while self._replay is replay and replay.poll(0):
            self._patience_until = time.monotonic() + REPLAY_TIMEOUT_S
            frames: list[bytes] = [b"", *replay.recv_multipart()]
            number, payload = frames[-2:]
            if len(number) != SEQUENCE_BYTES:
                self._unreadable("what is sent again has no sequence number and payload")
                continue
            if number == END_OF_REPLAY:
                self._retry_s = RETRY_S
                self._end_replay()
                self._follow(self.sequence.replay_ended())
                return
            self._take(number, payload, replayed=True)
        if self._replay is replay and not self.sequence.is_waiting:
            self._end_replay()
        elif self._replay is replay and time.monotonic() > self._patience_until:
            logger.warning("the replay endpoint of worker %s does not answer", self._spec.name)
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            self._end_replay()
            self._follow(self.sequence.replay_ended())

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None


class EventReader:
    """The thread that reads. Workers without an events endpoint are left out."""

    def __init__(self, workers: Iterable[WorkerSpec], listener: Listener) -> None:
        """Subscribe to all workers and begin to read.

        Raises:
            ConfigError: An endpoint cannot be used.
            ImportError: pyzmq or msgspec is not installed.
        """
        self._zmq = load_zmq()
        require_msgpack()
        self._streams: dict[str, WorkerStream] = {}
        self._failed: set[WorkerStream] = set()
        try:
            for spec in workers:
                if spec.events is not None:
                    self._streams[spec.name] = WorkerStream(spec, listener, self._zmq)
        except BaseException:
            self._close_streams()
            raise
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraft-router-events", daemon=True)
        self._thread.start()

    def sequences(self) -> dict[str, BatchSequence]:
        """Return the streams by worker, for their counters."""
        return {name: stream.sequence for name, stream in self._streams.items()}

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop reading and close the sockets."""
        self._closing.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wait()
                for stream in self._streams.values():
                    self._read(stream)
        finally:
            self._close_streams()

    def _wait(self) -> None:
        poller = self._zmq.Poller()
        for stream in self._streams.values():
            for socket in stream.sockets():
                poller.register(socket, self._zmq.POLLIN)
        if not poller.poll(_POLL_MS) and not self._streams:
            self._closing.wait(_POLL_MS / 1e3)

    def _read(self, stream: WorkerStream) -> None:
        try:
            stream.read()
        except Exception:
            if stream not in self._failed:
                self._failed.add(stream)
                logger.exception(
                    "reading the events of a worker failed; the next ones are tried, and this is logged once"
                )

    def _close_streams(self) -> None:
        for stream in self._streams.values():
            stream.close()
