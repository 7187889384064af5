"""What somebody who may write to a Redis database puts where values of donors are expected: it hides no donor."""

from __future__ import annotations

import struct
import tracemalloc
import zlib

import pytest
from tests.store_servers import PATIENCE_S, RedisServer, need_redis

from kvgraft.errors import StoreError
from kvgraft.memory.store import open_store
from kvgraft.memory.store.parts import Parts
from kvgraft.testing.store_suite import feeding, reading
from kvgraft.testing.stored_objects import SPACE, fault_of, make_object

GOOD = [make_object(number, 20) for number in range(3)]
VICTIM = make_object(9, 20)
HEAD, INDEX, TOKEN = f"kvgraft:h:{SPACE}:{VICTIM.key}", f"kvgraft:i:{SPACE}", f"kvgraft:v:{SPACE}"


def parts(drawn=b"d" * 8, part_bytes=1 << 14, num_bytes=1920, magic=b"kvg1"):
    raw = struct.pack("<4s8sQQ", magic, drawn, part_bytes, num_bytes)
    return raw + zlib.crc32(raw).to_bytes(4, "little")


def set_head(value):
    return lambda client: client.set(HEAD, value)


def other_type(name, make):
    def craft(client):
        client.delete(name)
        make(client, name)

    return craft


def a_list(client, name):
    client.rpush(name, "x")


HEADS = {
    "empty": set_head(b""),
    "short": set_head(b"kvg1"),
    "foreign": set_head(b"GIF89a" * 1_000),
    "parts of nothing": set_head(parts(part_bytes=0) + VICTIM.head),
    "parts of a byte": set_head(parts(part_bytes=1, num_bytes=(1 << 64) - 1) + VICTIM.head),
    "a part of everything": set_head(parts(part_bytes=1 << 63, num_bytes=(1 << 64) - 1) + VICTIM.head),
    "parts alone": set_head(parts()),
    "100 MB": set_head(parts() + VICTIM.head + bytes(100 << 20)),
    "a list": other_type(HEAD, a_list),
    "a hash": other_type(HEAD, lambda client, name: client.hset(name, "a", "b")),
    "a set": other_type(HEAD, lambda client, name: client.sadd(name, "a")),
    "a sorted set": other_type(HEAD, lambda client, name: client.zadd(name, {"a": 1})),
}

INDEXES = {
    "index is a list": other_type(INDEX, a_list),
    "index is text": other_type(INDEX, lambda client, name: client.set(name, "x")),
    "index is a set": other_type(INDEX, lambda client, name: client.sadd(name, "a")),
    "token is a list": other_type(TOKEN, a_list),
    "names that are no text": lambda client: client.zadd(INDEX, {b"\xff\xfe": 9e9, b"\0": 9e9, b"": 9e9}),
    "names that lead elsewhere": lambda client: client.zadd(
        INDEX, {"../a": 9e9, "A": 9e9, "x" * 100_000: 9e9, "*a": 9e9}
    ),
    "many names of nothing": lambda client: client.zadd(INDEX, {f"{number:032x}": 9e9 for number in range(2_000)}),
    "no index, heads with odd names": lambda client: (
        client.delete(INDEX),
        client.mset({f"kvgraft:h:{SPACE}:".encode() + name: b"x" for name in (b"\xff", b"../a", b"A", b"")}),
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    need_redis()
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def client(server):
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def store(server, client):
    store = open_store(server.url(value_bytes=1 << 14))
    for wanted in (*GOOD, VICTIM):
        store.put(SPACE, wanted.key, wanted.head, wanted.body)
    yield store
    store.close()


def told(store):
    with feeding(store) as feed:
        assert feed.look(PATIENCE_S)
        return {record.key for record in feed.news(1_000).added}


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_crafted_head_hides_no_donor_and_goes(server, client, store, kind, is_known):
    """Whether this process knows the object from before or not."""
    if is_known:
        assert fault_of(store, VICTIM) == ""
    reader_of_it = store if is_known else open_store(server.url())
    HEADS[kind](client)
    tracemalloc.start()
    try:
        assert told(reader_of_it) == {wanted.key for wanted in GOOD}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20
    assert [fault_of(reader_of_it, wanted) for wanted in (*GOOD, VICTIM)] == ["", "", "", "lost"]
    assert reader_of_it.keys(SPACE) == {wanted.key for wanted in GOOD}
    assert reader_of_it.put(SPACE, VICTIM.key, VICTIM.head, VICTIM.body) is True
    assert fault_of(reader_of_it, VICTIM) == ""


@pytest.mark.parametrize("kind", HEADS)
def test_a_crafted_head_is_a_counted_miss(server, client, store, kind):
    HEADS[kind](client)
    with reading(open_store(server.url())) as reader:
        fetch = reader.fetch(VICTIM.key, 0, 20)
        assert fetch.wait(PATIENCE_S)
        with pytest.raises(StoreError):
            fetch.block()
        assert (reader.counters.hits, reader.counters.failed) == (0, 0)
        assert reader.counters.corrupt + reader.counters.missing == 1
        assert not reader.is_resting


@pytest.mark.parametrize("kind", INDEXES)
def test_a_crafted_index_hides_no_donor(server, client, store, kind):
    INDEXES[kind](client)
    for looking in (store, open_store(server.url())):
        assert told(looking) == {wanted.key for wanted in (*GOOD, VICTIM)}
    new = make_object(5, 20)
    assert store.put(SPACE, new.key, new.head, new.body) is True
    assert told(store) == {wanted.key for wanted in (*GOOD, VICTIM, new)}
    store.remove(SPACE, new.key)


@pytest.mark.parametrize("wrong", ["list", "hash"])
def test_a_part_that_is_no_text_is_a_counted_miss(client, store, wrong):
    (name,) = client.keys(f"kvgraft:b:{SPACE}:{VICTIM.key}:*")
    client.delete(name)
    client.rpush(name, "x") if wrong == "list" else client.hset(name, "a", "b")
    with reading(store) as reader:
        fetch = reader.fetch(VICTIM.key, 0, 20)
        assert fetch.wait(PATIENCE_S)
        with pytest.raises(StoreError):
            fetch.block()
        assert (reader.counters.hits, reader.counters.missing, reader.counters.failed) == (0, 1, 0)
    assert fault_of(store, VICTIM) == "lost"


def test_long_heads_come_whole(server, store):
    """Longer than what is asked for at first, among short ones."""
    store = open_store(server.url())
    long = [make_object(number, num_tokens) for number, num_tokens in ((20, 5_000), (21, 40_000), (22, 700_000))]
    for wanted in long:
        store.put(SPACE, wanted.key, wanted.head, wanted.body)
    expected = {wanted.key: wanted.head for wanted in (*GOOD, VICTIM, *long)}
    assert dict(store.heads(SPACE, list(expected))) == expected


@pytest.mark.parametrize(("part_bytes", "num_bytes"), [(0, 0), (0, 5), (1, 1 << 40), (1 << 14, (1 << 64) - 1)])
def test_parts_that_nobody_draws_are_none(part_bytes, num_bytes):
    assert Parts.unpack(parts(part_bytes=part_bytes, num_bytes=num_bytes)) is None
    assert Parts.unpack(parts()) is not None
