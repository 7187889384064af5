"""KV events: hashes that chain and survive splits, coalescing, and the wire format as vLLM's and SGLang's readers take it."""

from __future__ import annotations

import hashlib
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvgraft.errors import ConfigError, IntegrationError
from kvgraft.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from kvgraft.events.publisher import PublisherConfig, ZmqEventPublisher, ZmqEventSubscriber
from kvgraft.events.wire import EventBatch, decode_batch, encode_batch
from kvgraft.prefix import RadixCache, RadixKey, SWARadixCache


def make_cache(page_size=1, **options):
    log = EventLog(**options)
    return RadixCache(page_size, events=log), log


def put(cache, *token_ids, first_slot=0, **namespace):
    return cache.insert(RadixKey(token_ids, **namespace), np.arange(first_slot, first_slot + len(token_ids)))


# hashes


def test_pages_are_named_by_a_chain_of_sha256():
    cache, log = make_cache(2)
    put(cache, 1, 2, 3, 4, 5)
    (stored,) = log.take()
    seed = log._seed((None, None, False))
    first = hashlib.sha256(seed + struct.pack("<2q", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2q", 3, 4)).digest()
    assert stored.block_hashes == tuple(struct.unpack(">q", digest[:8])[0] for digest in (first, second))
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, (1, 2, 3, 4), 2)


def test_a_continuation_names_its_parent():
    cache, log = make_cache()
    put(cache, 1, 2)
    (first,) = log.take()
    put(cache, 1, 2, 3)
    (second,) = log.take()
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == (3,)


def hashes_of(key=b"", **namespace):
    cache, log = make_cache(key=key)
    put(cache, 1, 2, **namespace)
    return log.take()[0].block_hashes


def test_namespaces_and_keys_have_hashes_of_their_own():
    namespaces = [{}, {"extra_key": "a"}, {"cache_salt": "a"}, {"extra_key": b"a"}, {"extra_key": ""}]
    found = {hashes_of(**namespace) for namespace in namespaces} | {hashes_of(b"secret")}
    assert len(found) == len(namespaces) + 1
    assert hashes_of(b"secret", extra_key="a") == hashes_of(b"secret", extra_key="a")


def test_splits_keep_the_hashes():
    cache, log = make_cache(2)
    put(cache, *range(8))
    cache.match_prefix(RadixKey([0, 1, 2, 3, 99, 99]))
    cache.check()
    put(cache, 0, 1, 2, 3, 50, 51, first_slot=10)
    cache.evict(100)
    stored = [h for event in log.take() if isinstance(event, BlockStored) for h in event.block_hashes]
    assert len(stored) == 5
    fresh, other = make_cache(2)
    put(fresh, 0, 1, 2, 3, 50, 51)
    assert other.take()[0].block_hashes == (*stored[:2], stored[4])


# coalescing


def test_chunks_of_one_sequence_become_one_event():
    cache, log = make_cache()
    handle = None
    for end in range(10, 51, 10):
        handle = cache.insert(RadixKey(np.arange(end)), np.arange(end), after=handle).handle
    (stored,) = log.take()
    assert stored.token_ids == tuple(range(50))
    assert len(log) == 0


def test_unrelated_sequences_and_other_namespaces_stay_apart():
    cache, log = make_cache()
    put(cache, 1, 2)
    put(cache, 3, 4, first_slot=10)
    put(cache, 3, 4, 5, first_slot=20, cache_salt="s")
    events = log.take()
    assert [event.token_ids for event in events] == [(1, 2), (3, 4), (3, 4, 5)]
    assert [event.cache_salt for event in events] == [None, None, "s"]


def test_removals_become_one_event_and_order_is_kept():
    cache, log = make_cache()
    put(cache, 1, 2)
    put(cache, 3, 4, first_slot=10)
    cache.evict(4)
    put(cache, 5, first_slot=20)
    cache.reset()
    events = log.take()
    assert [type(event) for event in events] == [BlockStored, BlockStored, BlockRemoved, BlockStored, AllBlocksCleared]
    assert events[2].block_hashes == events[0].block_hashes + events[1].block_hashes


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("hybrid", [False, True])
def test_replaying_the_events_gives_what_is_stored(page_size, hybrid):
    rng = np.random.default_rng(1)
    log = EventLog()
    options = {"sliding_window_size": 6} if hybrid else {}
    cache = (SWARadixCache if hybrid else RadixCache)(page_size, events=log, **options)
    known, next_slot = set(), 0
    for _ in range(400):
        token_ids = np.repeat(rng.integers(0, 3, int(rng.integers(1, 9))), page_size)
        slots = np.arange(next_slot, next_slot + len(token_ids))
        next_slot += len(token_ids)
        swa = {"swa_indices": slots} if hybrid else {}
        cache.insert(RadixKey(token_ids), slots, **swa)
        cache.match_prefix(RadixKey(token_ids[: len(token_ids) // 2]))
        cache.evict(int(rng.integers(5)))
        for event in log.take():
            if isinstance(event, BlockStored):
                assert not known & set(event.block_hashes)
                known |= set(event.block_hashes)
            else:
                assert known >= set(event.block_hashes)
                known -= set(event.block_hashes)
        assert len(known) * page_size == cache.total_size
        cache.check()


# cost


@pytest.mark.parametrize("hybrid", [False, True])
def test_eviction_writes_each_hash_into_an_event_once(monkeypatch, hybrid):
    """Neighbouring removals become one event without writing what it has so far again."""
    written = []

    @dataclass(frozen=True, slots=True)
    class Counted(BlockRemoved):
        def __post_init__(self):
            written.append(len(self.block_hashes))

    monkeypatch.setattr("kvgraft.events.log.BlockRemoved", Counted)
    log = EventLog()
    cache = SWARadixCache(1, sliding_window_size=4, events=log) if hybrid else RadixCache(1, events=log)
    for first in range(300):
        slots = np.arange(4 * first, 4 * first + 4)
        cache.insert(RadixKey([first, 1, 2, 3]), slots, **({"swa_indices": slots} if hybrid else {}))
    log.take()
    for _ in range(300):
        cache.evict(4)
    (removed,) = log.take()
    assert len(removed.block_hashes) == 4 * 300
    assert sum(written) == 4 * 300


def lines_run(function):
    """Lines of Python that a call runs: work, counted without a clock."""
    count, outer = 0, sys.gettrace()

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(outer)
    return count


@pytest.mark.parametrize("make", [lambda log: RadixCache(1, events=log), lambda log: RadixCache(1)])
def test_a_long_chain_costs_its_length_with_events_as_without(make):
    def run(num_nodes):
        cache, handle = make(EventLog()), None
        tokens = np.arange(num_nodes)
        for end in range(1, num_nodes + 1):
            handle = cache.insert(RadixKey(tokens[:end]), tokens[:end], after=handle).handle
        cache.evict(num_nodes)
        assert cache.total_size == 0

    assert lines_run(lambda: run(400)) < 2.2 * lines_run(lambda: run(200))


def test_rotating_salts_leave_nothing_behind():
    """A tenant that never comes back costs nothing once its pages are gone and its events are fetched."""
    cache, log = make_cache(2, key=b"secret")
    known, most_entries = set(), 0
    for turn in range(5_000):
        put(cache, 1, 2, 3, 4, 5, 6, first_slot=6 * turn, cache_salt=f"tenant-{turn}", extra_key=turn)
        if cache.total_size > 60:
            cache.evict(cache.total_size - 60)
        for event in log.take():
            if isinstance(event, BlockStored):
                known |= set(event.block_hashes)
            else:
                known -= set(event.block_hashes)
        entries = sum(len(value) for value in vars(log).values() if isinstance(value, (dict, list, set)))
        most_entries = max(most_entries, entries)
    assert most_entries <= 2
    assert len(known) == cache.total_size // 2 == 30
    assert len(cache.root_handle.children) == 10


# wire format


class Event(msgspec.Struct, tag=True, omit_defaults=True):
    """As both engines declare their events today: maps tagged by class name."""


class ReaderBlockStored(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    session_id: str | None = None


class ReaderBlockRemoved(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class ReaderAllBlocksCleared(Event, tag="AllBlocksCleared"):
    pass


class ReaderBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ReaderBlockStored | ReaderBlockRemoved | ReaderAllBlocksCleared]
    attn_dp_rank: int | None = None


class SGLangBlockStored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class OldEvent(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    """As older vLLM: arrays that begin with the class name."""


class OldBlockStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class OldBlockRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None = None


class OldAllBlocksCleared(OldEvent, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]
    dp_rank: int | None = None


EVENTS = (
    BlockStored((1, -2), None, (5, 6), 1, medium="GPU", cache_salt="s", lora_name="l"),
    BlockStored((3,), -2, (7,), 1, medium="GPU"),
    BlockRemoved((3,), "GPU"),
    AllBlocksCleared(),
)
BATCH = EventBatch(12.5, EVENTS, 3)


def test_a_reader_of_vllm_takes_our_maps():
    batch = msgspec.msgpack.decode(encode_batch(BATCH), type=ReaderBatch)
    assert (batch.ts, batch.attn_dp_rank) == (12.5, 3)
    assert [type(event).__name__ for event in batch.events] == [
        "ReaderBlockStored",
        "ReaderBlockStored",
        "ReaderBlockRemoved",
        "ReaderAllBlocksCleared",
    ]
    assert (batch.events[0].block_hashes, batch.events[0].parent_block_hash) == ([1, -2], None)
    assert (batch.events[1].parent_block_hash, batch.events[0].lora_name) == (-2, "l")


def test_a_reader_of_sglang_takes_our_maps():
    batch = EventBatch(1.0, EVENTS[:2], 0)
    payload = encode_batch(batch)
    _, events, _ = msgspec.msgpack.decode(payload, type=tuple[float, list[SGLangBlockStored], int])
    assert (events[0].cache_salt, events[0].medium) == ("s", "GPU")


def test_a_reader_of_older_vllm_takes_our_arrays():
    batch = msgspec.msgpack.decode(encode_batch(BATCH, as_arrays=True), type=OldBatch)
    assert batch.events[1].token_ids == [7]
    assert batch.events[2].medium == "GPU"


@pytest.mark.parametrize("as_arrays", [False, True])
def test_we_read_what_we_write(as_arrays):
    decoded = decode_batch(encode_batch(BATCH, as_arrays=as_arrays))
    assert decoded.timestamp == 12.5
    assert decoded.dp_rank == 3
    assert [type(event) for event in decoded.events] == [type(event) for event in EVENTS]
    assert decoded.events[0].token_ids == (5, 6)
    if not as_arrays:
        assert decoded.events == EVENTS


def test_we_read_both_engines_and_skip_what_is_unknown():
    vllm = ReaderBatch(
        1.0, [ReaderBlockStored([b"\x01", 2], None, [5], 16, None, None, None, extra_keys=[["x"]], group_idx=0)]
    )
    old = OldBatch(1.0, [OldBlockStored([9], 8, [5], 16, None), OldAllBlocksCleared()])
    assert decode_batch(msgspec.msgpack.encode(vllm)).events[0].block_hashes == (b"\x01", 2)
    assert decode_batch(msgspec.msgpack.encode(old)).events == (BlockStored((9,), 8, (5,), 16), AllBlocksCleared())
    unknown = msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}, {"type": "AllBlocksCleared"}], None])
    assert decode_batch(unknown).events == (AllBlocksCleared(),)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [7]])])
def test_nonsense_is_refused_in_one_line(payload):
    with pytest.raises(IntegrationError, match="not a batch of KV events"):
        decode_batch(payload)


# publisher


PATIENCE_S = 60


def receive(subscriber, num_batches):
    batches, deadline = [], time.monotonic() + PATIENCE_S
    while len(batches) < num_batches and time.monotonic() < deadline:
        batches += subscriber.receive(0.05)
    return batches


def join(publisher, subscriber, first=0):
    """Publish until something arrives, because PUB drops what is sent before it knows of the subscription.

    Returns the batches that arrived, up to the last one that was published. Their events are numbered from `first` on.
    """
    batches, number, deadline = [], first, time.monotonic() + PATIENCE_S
    while not batches and time.monotonic() < deadline:
        publisher.publish([BlockRemoved((number,))])
        number += 1
        batches = subscriber.receive(0.2)
    while batches[-1].events[0].block_hashes != (number - 1,):
        batches += subscriber.receive(0.2)
    return batches


@pytest.fixture
def endpoints(tmp_path):
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


def test_a_subscriber_gets_what_a_cache_publishes(endpoints):
    cache, log = make_cache(2)
    publisher = ZmqEventPublisher(PublisherConfig(endpoints[0], topic="kv"))
    subscriber = ZmqEventSubscriber(endpoints[0], topic="kv")
    join(publisher, subscriber)
    put(cache, 1, 2, 3, 4)
    publisher.publish(log.take())
    publisher.publish([])
    cache.evict(4)
    publisher.publish(log.take())
    batches = receive(subscriber, 2)
    publisher.close()
    subscriber.close()
    stored, removed = (batch.events[0] for batch in batches)
    assert stored.token_ids == (1, 2, 3, 4)
    assert removed.block_hashes == stored.block_hashes
    assert subscriber.num_missed == 0


def test_a_late_subscriber_is_told_what_it_missed(endpoints):
    publisher = ZmqEventPublisher(PublisherConfig(endpoints[0], endpoints[1], buffer_steps=3))
    early = ZmqEventSubscriber(endpoints[0])
    sent = join(publisher, early)[-1].events[0].block_hashes[0] + 1
    for number in range(sent, sent + 5):
        publisher.publish([BlockRemoved((number,))])
    receive(early, 5)
    subscriber = ZmqEventSubscriber(endpoints[0], replay_endpoint=endpoints[1])
    numbers = [batch.events[0].block_hashes[0] for batch in join(publisher, subscriber, first=sent + 5)]
    publisher.close()
    early.close()
    subscriber.close()
    # The three newest were kept when it asked, the one that told it of a gap among them.
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert len(numbers) >= 3
    assert subscriber.num_missed == numbers[0] > 0


@pytest.mark.parametrize("can_replay", [False, True])
def test_a_publisher_that_was_started_anew_is_heard(endpoints, can_replay):
    """It counts from 0 again, and holds nothing of what the one before it has announced."""
    replay = endpoints[1] if can_replay else None
    publisher = ZmqEventPublisher(PublisherConfig(endpoints[0], replay))
    subscriber = ZmqEventSubscriber(endpoints[0], replay_endpoint=replay)
    sent = join(publisher, subscriber)[-1].events[0].block_hashes[0] + 1
    for number in range(sent, sent + 1000):  # more than are sent below before the first of them arrives
        publisher.publish([BlockRemoved((number,))])
    receive(subscriber, 1000)
    publisher.close()
    anew = ZmqEventPublisher(PublisherConfig(endpoints[0], replay))
    first, *batches = join(anew, subscriber, first=5000)
    anew.close()
    subscriber.close()
    assert first.events == (AllBlocksCleared(),)
    numbers = [batch.events[0].block_hashes[0] for batch in batches]
    assert numbers == list(range(numbers[0], numbers[-1] + 1))
    assert subscriber.num_restarts == 1
    assert numbers[0] == 5000 if can_replay else subscriber.num_missed >= numbers[0] - 5000


def test_a_full_queue_drops_and_counts(endpoints, monkeypatch, caplog):
    goes_on = threading.Event()
    monkeypatch.setattr(ZmqEventPublisher, "_send_next", lambda self: not goes_on.wait(PATIENCE_S))
    publisher = ZmqEventPublisher(PublisherConfig(endpoints[0], max_queue_size=1))
    for _ in range(3):
        publisher.publish([AllBlocksCleared()])
    assert publisher.num_dropped == 2
    goes_on.set()
    publisher.close(0.1)
    assert "KV events are dropped" in caplog.text


def test_bad_settings_and_endpoints_are_named(endpoints):
    with pytest.raises(ConfigError, match="buffer_steps"):
        PublisherConfig(buffer_steps=0)
    with pytest.raises(IntegrationError, match="cannot open 'nonsense'"):
        ZmqEventPublisher(PublisherConfig("nonsense"))


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(ImportError, match="pip install 'kvgraft\\[router\\]'"):
        encode_batch(BATCH)
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ImportError, match="pip install 'kvgraft\\[router\\]'"):
        ZmqEventPublisher()


def test_pages_of_a_namespace_key_are_not_everyones():
    """The engine names a tenant by `Namespace.key` alone: a reader that knows no salt must not share its text."""
    cache, log = make_cache(common_key=b"common")
    for key in (b"common", b"alice", None, "adapter"):
        put(cache, 1, 2, extra_key=key)
    assert [event.cache_salt for event in log.take()] == [None, "kvgraft-namespace:" + b"alice".hex(), None, None]


# what is lost

WAIT_MS = 30_000


def numbers_of(socket, last):
    """Numbers of what is received, up to `last`."""
    numbers = []
    while not numbers or numbers[-1] < last:
        assert socket.poll(WAIT_MS), f"only {numbers} came"
        numbers.append(int.from_bytes(socket.recv_multipart()[1], "big"))
    return numbers


@pytest.fixture
def published():
    """A publisher with room for one batch, and a reader that it has heard of."""
    publisher = ZmqEventPublisher(PublisherConfig(endpoint="inproc://numbered", max_queue_size=1))
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect("inproc://numbered")
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    first = 0
    while not socket.poll(20):
        publisher.publish([BlockRemoved((0,))])
        first = publisher._num_published
    while socket.poll(50):
        socket.recv_multipart()
    yield publisher, socket, max(first, publisher._num_published)
    publisher.close()
    socket.close(linger=0)


def test_batches_that_a_full_queue_drops_are_a_gap(published):
    publisher, socket, first = published
    big = BlockStored(tuple(range(20_000)), None, tuple(range(320_000)), 16)
    dropped = publisher.num_dropped
    for _ in range(4):
        publisher.publish([big])
    assert publisher.num_dropped > dropped
    # Nothing else is published: the gap shows by itself.
    numbers = numbers_of(socket, first + 4)
    assert numbers[-1] == first + 4
    assert len(numbers) < 5


def test_a_batch_that_cannot_be_written_is_a_gap_and_no_end(published):
    publisher, socket, first = published
    publisher.publish([BlockStored((1,), None, tuple(range(16)), 16, cache_salt="\ud800")])
    assert numbers_of(socket, first + 1) == [first + 1]
    publisher.publish([BlockRemoved((1,))])
    assert numbers_of(socket, first + 2) == [first + 2]
    assert publisher.num_failed == 1
