"""The thread that reads events, over real sockets: late, cut off, restarted and silent publishers."""

from __future__ import annotations

import time

import pytest
from tests.unit.router.engine_model import EngineModel, scope

zmq = pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")

from kvgraft.errors import ConfigError  # noqa: E402
from kvgraft.events import EventBatch, PublisherConfig, ZmqEventPublisher, encode_batch  # noqa: E402
from kvgraft.router import subscriber  # noqa: E402
from kvgraft.router.directory import Directory  # noqa: E402
from kvgraft.router.subscriber import EventReader  # noqa: E402
from kvgraft.router.worker import WorkerSpec  # noqa: E402

WAIT_S = 60.0
TEXT = list(range(64))
MORE = list(range(200, 264))


def until(condition, what):
    """Wait for the thing itself; the clock only ends a test that would hang."""
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < give_up, what
        time.sleep(0.01)


def encoded(value):
    return msgspec.msgpack.encode(value)


class Watched:
    """A directory that a reader keeps, of one worker `w`."""

    def __init__(self, events, replay=None, topic=""):
        spec = WorkerSpec("http://127.0.0.1:1", events=events, replay=replay, topic=topic, name="w")
        self.directory = Directory([spec], max_tokens=10_000)
        self.reader = EventReader([spec], self.directory)

    @property
    def sequence(self):
        return self.reader.sequences()["w"]

    def exact(self, text):
        return self.directory.score([*text, 0], scope())["w"].exact_tokens

    def until(self, text, tokens):
        until(lambda: self.exact(text) == tokens, f"{tokens} tokens of the text, not {self.exact(text)}")


@pytest.fixture
def endpoints(tmp_path):
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def opened(request):
    """Makes what is closed at the end."""
    things = []

    def open_thing(thing):
        things.append(thing)
        return thing

    yield open_thing
    for thing in reversed(things):
        (thing.reader if isinstance(thing, Watched) else thing).close()


class RawPublisher:
    """Sends what a test says, with the numbers that it says; answers replays as vLLM does, with the topic in front.

    Args:
        names_topic: Whether replays name the topic; those of older engines do not.
    """

    def __init__(self, events, replay=None, *, names_topic=True):
        self.topic = (b"topic",) if names_topic else ()
        context = zmq.Context.instance()
        self.socket = context.socket(zmq.XPUB)
        self.socket.bind(events)
        self.router = None
        if replay is not None:
            self.router = context.socket(zmq.ROUTER)
            self.router.bind(replay)
        self.kept = {}

    def await_reader(self):
        assert self.socket.poll(WAIT_S * 1e3), "the reader subscribes"
        self.socket.recv()

    def send(self, number, events, *, timestamp=None, as_arrays=False, lost=False, topic=b""):
        payload = encode_batch(
            EventBatch(float(number if timestamp is None else timestamp), tuple(events)), as_arrays=as_arrays
        )
        self.kept[number] = payload
        if not lost:
            self.socket.send_multipart((topic, number.to_bytes(8, "big"), payload))

    def answer_replay(self):
        assert self.router.poll(WAIT_S * 1e3), "a replay is asked for"
        client, _, first = self.router.recv_multipart()
        for number, payload in sorted(self.kept.items()):
            if number >= int.from_bytes(first, "big"):
                self.router.send_multipart((client, b"", *self.topic, number.to_bytes(8, "big"), payload))
        end = (-1).to_bytes(8, "big", signed=True)
        self.router.send_multipart((client, b"", *(b"" for _ in self.topic), end, b""))
        return int.from_bytes(first, "big")

    def answer_replays_until(self, condition):
        """However many are asked for: a reader asks for more than its gaps, by its clock."""
        give_up = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < give_up, "the gap is closed"
            if self.router.poll(10):
                self.answer_replay()

    def close(self):
        self.socket.close(linger=0)
        if self.router is not None:
            self.router.close(linger=0)


@pytest.mark.parametrize("as_arrays", [False, True])
def test_what_is_published_is_known(endpoints, opened, as_arrays):
    publisher = opened(RawPublisher(endpoints[0]))
    watched = opened(Watched(endpoints[0]))
    publisher.await_reader()
    engine = EngineModel(16)
    publisher.send(0, engine.store(TEXT), as_arrays=as_arrays)
    watched.until(TEXT, 64)
    publisher.send(1, [engine.remove([engine.chain(TEXT)[-1][0]], "GPU")], as_arrays=as_arrays)
    watched.until(TEXT, 48)
    publisher.send(2, [engine.clear()], as_arrays=as_arrays)
    watched.until(TEXT, 0)
    assert watched.sequence.num_lost == 0


def test_a_lost_batch_without_replay_makes_everything_forgotten(endpoints, opened):
    publisher = opened(RawPublisher(endpoints[0]))
    watched = opened(Watched(endpoints[0]))
    publisher.await_reader()
    engine = EngineModel(16)
    publisher.send(0, engine.store(TEXT))
    watched.until(TEXT, 64)
    publisher.send(1, [engine.remove([engine.chain(TEXT)[0][0]], "GPU")], lost=True)
    publisher.send(2, engine.store(MORE))
    watched.until(MORE, 64)
    assert watched.exact(TEXT) == 0
    assert watched.sequence.num_lost == 1


@pytest.mark.parametrize("names_topic", [True, False])
def test_a_lost_batch_is_replayed(endpoints, opened, monkeypatch, names_topic):
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", WAIT_S)
    publisher = opened(RawPublisher(*endpoints, names_topic=names_topic))
    watched = opened(Watched(*endpoints))
    publisher.await_reader()
    engine = EngineModel(16)
    assert publisher.answer_replay() == 0
    publisher.send(0, engine.store(TEXT))
    watched.until(TEXT, 64)
    publisher.send(1, [engine.remove([engine.chain(TEXT)[2][0]], "GPU")], lost=True)
    publisher.send(2, engine.store(MORE))
    publisher.answer_replays_until(lambda: watched.exact(MORE) == 64)
    watched.until(TEXT, 32)
    assert watched.sequence.num_lost == 0


def test_a_replay_endpoint_that_is_silent_is_given_up(endpoints, opened, monkeypatch):
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", 0.05)
    publisher = opened(RawPublisher(*endpoints))
    watched = opened(Watched(*endpoints))
    publisher.await_reader()
    engine = EngineModel(16)
    publisher.send(0, engine.store(TEXT))
    watched.until(TEXT, 64)
    publisher.send(2, engine.store(MORE))
    watched.until(MORE, 64)
    assert (watched.exact(TEXT), watched.sequence.num_lost) == (0, 1)


def test_a_replay_that_comes_too_late_brings_nothing_back(endpoints, opened, monkeypatch):
    """llm-d-router#1737, #1887, Mooncake#4159, dynamo#7463, vllm#45174, #45177: a replay times out, and comes later.

    There the live removal is applied first, and the late replay brings the removed block back. Here nothing is believed
    across the hole, and once the endpoint answers all that is there is known again, and no more.
    """
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(subscriber, "RETRY_S", 0.2)
    publisher, engine = opened(RawPublisher(*endpoints)), EngineModel(16)
    removed, kept, later = (list(range(first, first + 64)) for first in (1_000, 2_000, 3_000))
    watched = opened(Watched(*endpoints))
    publisher.await_reader()
    publisher.answer_replay()
    publisher.send(0, engine.store(TEXT))
    publisher.answer_replays_until(lambda: watched.exact(TEXT) == 64)
    publisher.send(5, engine.store(removed), lost=True)
    for number in (1, 2, 3, 4, 6, 7, 8):
        publisher.send(number, engine.store(list(range(5_000 + 100 * number, 5_032 + 100 * number))), lost=True)
    publisher.send(9, engine.store(kept), lost=True)
    publisher.send(10, [engine.remove([page[0] for page in engine.chain(removed)], "GPU")])
    watched.until(TEXT, 0)
    assert watched.sequence.num_lost == 1
    assert watched.exact(removed) == watched.exact(kept) == 0
    publisher.send(11, engine.store(later))
    watched.until(later, 64)
    publisher.answer_replays_until(lambda: watched.exact(kept) == 64)
    assert [watched.exact(text) for text in (removed, TEXT, later)] == [0, 64, 64]
    publisher.send(12, engine.store(MORE))
    publisher.answer_replays_until(lambda: watched.exact(MORE) == 64)
    assert watched.exact(removed) == 0


def test_another_topic_is_not_heard(endpoints, opened):
    publisher, engine = opened(RawPublisher(endpoints[0])), EngineModel(16)
    watched = opened(Watched(endpoints[0], topic="kv@w@"))
    publisher.await_reader()
    publisher.send(7, engine.store(MORE), topic=b"kv@other@")
    publisher.send(0, engine.store(TEXT), topic=b"kv@w@")
    watched.until(TEXT, 64)
    assert watched.exact(MORE) == 0
    assert watched.sequence.num_lost == watched.sequence.num_restarts == 0


def test_batches_in_another_order_are_put_right(endpoints, opened, monkeypatch):
    monkeypatch.setattr(subscriber, "REPLAY_TIMEOUT_S", WAIT_S)
    publisher = opened(RawPublisher(*endpoints))
    watched = opened(Watched(*endpoints))
    publisher.await_reader()
    publisher.answer_replay()
    engine = EngineModel(16)
    first, second = engine.store(TEXT), [engine.remove([engine.chain(TEXT)[1][0]], "GPU")]
    third = engine.store(MORE)
    publisher.send(0, first)
    publisher.send(2, third)
    publisher.send(1, second)
    publisher.answer_replays_until(lambda: watched.exact(MORE) == 64)
    watched.until(TEXT, 16)


def test_a_late_reader_is_told_what_it_missed(endpoints, opened):
    publisher = opened(ZmqEventPublisher(PublisherConfig(endpoints[0], replay_endpoint=endpoints[1])))
    engine = EngineModel(16)
    publisher.publish(engine.store(TEXT))
    watched = opened(Watched(*endpoints))
    watched.until(TEXT, 64)


@pytest.mark.parametrize("can_replay", [False, True])
def test_a_worker_that_is_started_anew_holds_nothing_of_before(endpoints, opened, can_replay):
    """It publishes nothing, so the new connection alone tells."""
    config = PublisherConfig(endpoints[0], replay_endpoint=endpoints[1])
    first = ZmqEventPublisher(config)
    watched = opened(Watched(endpoints[0], endpoints[1] if can_replay else None))
    engine = EngineModel(16)

    def is_known():
        first.publish([engine.clear(), *engine.store(TEXT)])
        return watched.exact(TEXT) == 64

    until(is_known, "the text is known")
    first.close()
    second = opened(ZmqEventPublisher(config))
    watched.until(TEXT, 0)
    fresh = EngineModel(16)

    def is_known_anew():
        second.publish([fresh.clear(), *fresh.store(MORE)])
        return watched.exact(MORE) == 64

    until(is_known_anew, "the new text is known")
    assert watched.exact(TEXT) == 0


def test_messages_that_are_no_events_are_counted_and_harm_nobody(endpoints, opened, caplog):
    publisher = opened(RawPublisher(endpoints[0]))
    watched = opened(Watched(endpoints[0]))
    publisher.await_reader()
    publisher.socket.send_multipart((b"", b"what"))
    publisher.socket.send_multipart((b"", (0).to_bytes(8, "big"), b"\xc1"))
    publisher.send(1, EngineModel(16).store(TEXT))
    watched.until(TEXT, 64)
    assert caplog.text.count("publishes what is no KV event") == 1


def test_bad_batches_are_told_of_in_one_line_for_all(endpoints, opened, caplog):
    """Nested too deeply, of other types, without names: none costs a traceback."""
    publisher = opened(RawPublisher(endpoints[0]))
    watched = opened(Watched(endpoints[0]))
    publisher.await_reader()
    bad = [
        b"\x91" * 100_000,
        b"\xdd" + b"\xff" * 4,
        b"",
        b"\xc0",
        encoded(None),
        encoded([1.0, 5]),
        encoded([1.0, [[7]]]),
    ]
    bad += [encoded([float(n), [{"type": "BlockStored", "block_hashes": n, "token_ids": None}], 0]) for n in range(20)]
    bad += [
        encoded(
            [
                1.0,
                [
                    {
                        "type": "BlockStored",
                        "block_hashes": hashes,
                        "parent_block_hash": None,
                        "token_ids": tokens,
                        "block_size": size,
                    }
                ],
                0,
            ]
        )
        for hashes in ([[1]], [1], None, [{}])
        for tokens in ([1], [[1]], "text", [1 << 60], 3)
        for size in (1, 0, -1, "1", [])
    ]
    for number, payload in enumerate(bad):
        publisher.socket.send_multipart((b"", number.to_bytes(8, "big"), payload))
    publisher.send(len(bad), EngineModel(16).store(TEXT))
    watched.until(TEXT, 64)
    assert not [record for record in caplog.records if record.exc_info]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) <= 2


def test_a_message_that_is_too_long_is_not_taken(endpoints, opened):
    """It ends the connection, which is made anew, and what follows is heard."""
    publisher = opened(RawPublisher(endpoints[0]))
    publisher.socket.setsockopt(zmq.XPUB_VERBOSER, 1)  # every subscription and its end is told, in any order
    watched = opened(Watched(endpoints[0]))
    publisher.await_reader()
    publisher.socket.send_multipart((b"", (0).to_bytes(8, "big"), bytes(subscriber.MOST_MESSAGE_BYTES + 1)))
    for _ in range(2):  # it has left, and is back
        publisher.await_reader()
    publisher.send(1, EngineModel(16).store(TEXT))
    watched.until(TEXT, 64)


def test_events_that_cannot_be_applied_make_everything_forgotten(endpoints, opened):
    publisher = opened(RawPublisher(endpoints[0]))
    watched = opened(Watched(endpoints[0]))
    publisher.await_reader()
    engine = EngineModel(16)
    publisher.send(0, engine.store(TEXT))
    watched.until(TEXT, 64)
    broken = EngineModel(1).store([1 << 40])
    publisher.send(1, broken)
    watched.until(TEXT, 0)
    publisher.send(2, EngineModel(16).store(MORE))
    watched.until(MORE, 64)


def test_an_endpoint_that_is_none_is_named():
    spec = WorkerSpec("http://127.0.0.1:1", events="tcp://no such host:x", name="w")
    with pytest.raises(ConfigError, match="cannot listen to 'tcp://no such host:x' of worker w"):
        EventReader([spec], Directory([spec], max_tokens=1_000))


def test_a_replay_endpoint_that_only_a_server_can_use_is_refused(endpoints):
    spec = WorkerSpec("http://127.0.0.1:1", events=endpoints[0], replay="tcp://*:5558", name="w")
    with pytest.raises(
        ConfigError, match=r"cannot ask 'tcp://\*:5558' of worker w for replays: .*; give the host and port"
    ):
        EventReader([spec], Directory([spec], max_tokens=10_000)).close()


def test_what_a_full_queue_dropped_is_not_believed(endpoints, opened):
    publisher = opened(ZmqEventPublisher(PublisherConfig(*endpoints, max_queue_size=1)))
    engine = EngineModel(16)
    watched = opened(Watched(*endpoints))
    publisher.publish(engine.store(TEXT))
    watched.until(TEXT, 64)
    big = EngineModel(16).store(range(1_000, 321_000))
    dropped = publisher.num_dropped
    for _ in range(3):
        publisher.publish(big)
    publisher.publish([engine.remove([engine.chain(TEXT)[0][0]], "GPU")])
    assert publisher.num_dropped > dropped
    watched.until(TEXT, 0)


def test_who_is_gone_for_long_is_not_believed(endpoints, opened, monkeypatch):
    monkeypatch.setattr(subscriber, "ABANDONED_S", 0.1)
    publisher = ZmqEventPublisher(PublisherConfig(*endpoints[:1], replay_endpoint=endpoints[1]))
    watched = opened(Watched(*endpoints))
    publisher.publish(EngineModel(16).store(TEXT))
    watched.until(TEXT, 64)
    publisher.close()
    watched.until(TEXT, 0)
    second = opened(ZmqEventPublisher(PublisherConfig(*endpoints[:1], replay_endpoint=endpoints[1])))
    second.publish(EngineModel(16).store(MORE))
    watched.until(MORE, 64)
