"""What a real Redis server does to donors: dies, hangs, fills up, evicts, expires, refuses. Skipped where there is none."""

from __future__ import annotations

import logging
import random
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.store_servers import PATIENCE_S, RedisServer, free_port, need_redis

from kvgraft.errors import CapacityError, ConfigError, StoreError, StoreMissError
from kvgraft.memory.store import open_store
from kvgraft.memory.store.tier import StoreFeed, StoreReader, StoreWriter
from kvgraft.testing.stored_objects import LAYOUT, SPACE, fault_of, make_object


@pytest.fixture
def server(tmp_path):
    need_redis()
    with RedisServer(tmp_path) as running:
        yield running


@pytest.fixture
def store(server):
    with_parts = open_store(server.url(value_bytes=1 << 14, timeout_s=0.5))
    yield with_parts
    with_parts.close()


def put(store, wanted):
    return store.put(SPACE, wanted.key, wanted.head, wanted.body)


def until(condition):
    """Wait for something that comes with time."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def raises_in_one_line(call):
    with pytest.raises(StoreError) as raised:
        call()
    assert len(str(raised.value).splitlines()) == 1
    assert not isinstance(raised.value, StoreMissError)


def test_a_server_that_died_comes_back_empty(server, store):
    wanted, into = make_object(1), memoryview(bytearray(10))
    put(store, wanted)
    assert store.keys(SPACE) == {wanted.key}
    server.kill()
    raises_in_one_line(lambda: store.read(SPACE, wanted.key, 0, into))
    raises_in_one_line(lambda: store.keys(SPACE))
    raises_in_one_line(lambda: put(store, wanted))
    server.start()
    with pytest.raises(StoreMissError):
        store.read(SPACE, wanted.key, 0, into)
    assert store.keys(SPACE) == frozenset()
    assert put(store, wanted) is True
    assert fault_of(store, wanted) == ""


def test_a_connection_that_was_closed_costs_nothing(server, store):
    wanted = make_object(1)
    put(store, wanted)
    with server.client() as client:
        client.client_kill_filter(_type="normal", skipme=True)
    assert fault_of(store, wanted) == ""


def test_a_server_that_hangs_costs_one_timeout(server, store):
    """Each call comes back while the server still hangs, and none is tried twice."""
    import redis

    wanted = make_object(1)
    put(store, wanted)
    server.pause()
    for call in (
        lambda: store.keys(SPACE),
        lambda: list(store.heads(SPACE, [wanted.key])),
        lambda: store.read(SPACE, wanted.key, 0, memoryview(bytearray(10))),
        lambda: put(store, make_object(2)),
        lambda: store.remove(SPACE, wanted.key),
        lambda: store.touch(SPACE, [wanted.key]),
    ):
        raises_in_one_line(call)
    server.resume()
    assert fault_of(store, wanted) in ("", "lost")  # what was asked while it hung may still be done
    assert redis.TimeoutError not in store._client.get_retry()._supported_errors


def test_a_full_server_refuses_and_goes_on(tmp_path):
    need_redis()
    with RedisServer(tmp_path, "--maxmemory-policy", "noeviction") as server, server.client() as client:
        store = open_store(server.url(value_bytes=1 << 14))
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        kept = []

        def fill_up():
            for number in range(1_000):
                put(store, make_object(number, 500))
                kept.append(make_object(number, 500))

        with pytest.raises(CapacityError, match="is full"):
            fill_up()
        assert {fault_of(store, wanted) for wanted in kept} == {""}
        parts = sum(-(-wanted.rows.nbytes // (1 << 14)) for wanted in kept)
        assert len(client.keys("kvgraft:b:*")) == parts  # nothing is left of the one that was refused
        store.remove(SPACE, kept[0].key)  # also when it is full
        store.touch(SPACE, [kept[1].key])
        assert store.keys(SPACE) == {wanted.key for wanted in kept[1:]}
        store.close()


def test_what_was_evicted_is_a_miss_and_leaves_the_index(server, store):
    """A head alone, a body alone, and both."""
    objects = [make_object(number) for number in range(4)]
    for wanted in objects:
        put(store, wanted)
    assert len(store.keys(SPACE)) == 4
    with server.client() as client:
        for wanted, patterns in zip(objects, ("h", "b", "hb"), strict=False):
            for kind in patterns:
                client.delete(client.keys(f"kvgraft:{kind}:{SPACE}:{wanted.key}*")[0])
    for wanted in objects[:3]:
        with pytest.raises(StoreMissError):
            store.read(SPACE, wanted.key, 0, memoryview(bytearray(len(wanted.body))))
    assert store.keys(SPACE) == {objects[3].key}
    assert put(store, objects[1]) is True
    assert fault_of(store, objects[1]) == fault_of(store, objects[3]) == ""


def test_listing_finds_what_was_evicted(server, store):
    """Though nobody reads it."""
    objects = [make_object(number, 20) for number in range(5)]
    for wanted in objects:
        put(store, wanted)
    assert len(store.keys(SPACE)) == 5
    with server.client() as client:
        client.delete(f"kvgraft:h:{SPACE}:{objects[0].key}")
    assert store.keys(SPACE) == {wanted.key for wanted in objects[1:]}


def test_an_evicted_index_is_made_again(server, store):
    objects = [make_object(number, 20) for number in range(5)]
    for wanted in objects:
        put(store, wanted)
    for lost in (f"kvgraft:i:{SPACE}", f"kvgraft:v:{SPACE}"):
        with server.client() as client:
            client.delete(lost)
        assert store.keys(SPACE) == {wanted.key for wanted in objects}


def test_listings_of_others_follow_changes(server, store):
    other = open_store(server.url())
    first, second = make_object(1, 20), make_object(2, 20)
    put(store, first)
    assert other.keys(SPACE) == store.keys(SPACE) == {first.key}
    put(other, second)
    assert other.keys(SPACE) == store.keys(SPACE) == {first.key, second.key}
    other.remove(SPACE, first.key)
    assert other.keys(SPACE) == store.keys(SPACE) == {second.key}
    other.close()


def test_what_nobody_touches_expires(server):
    store, wanted = open_store(server.url(ttl_s=1)), make_object(1)
    put(store, wanted)
    with server.client() as client:
        until(lambda: not client.keys("kvgraft:[hb]:*"))
    assert store.keys(SPACE) == frozenset()
    assert fault_of(store, wanted) == "lost"
    store.close()


def test_touch_begins_the_time_to_live_anew(server):
    store, wanted = open_store(server.url(ttl_s=5_000, value_bytes=1 << 14)), make_object(1)
    put(store, wanted)
    with server.client() as client:
        names = client.keys("kvgraft:[hb]:*")
        assert len(names) > 2
        for name in names:
            client.expire(name, 100)
        client.zadd(f"kvgraft:i:{SPACE}", {wanted.key: 1e9})
        store.touch(SPACE, [wanted.key, make_object(2).key])
        assert min(client.ttl(name) for name in names) > 4_000
        assert client.zscore(f"kvgraft:i:{SPACE}", wanted.key) > client.time()[0] + 4_000
    assert store.keys(SPACE) == {wanted.key}
    store.close()


def test_without_a_time_to_live_donors_stay(server):
    store, wanted = open_store(server.url(ttl_s=0)), make_object(1)
    put(store, wanted)
    store.touch(SPACE, [wanted.key])
    with server.client() as client:
        assert {client.ttl(name) for name in client.keys("kvgraft:[hbi]:*")} == {-1}
    assert store.keys(SPACE) == {wanted.key}
    store.close()


@pytest.mark.parametrize("value_bytes", [1024, 4096, 28_799, 28_800, 28_801, 1 << 20])
def test_spans_cross_values(server, value_bytes):
    """Values that end in the middle of rows, at the end of the body, one byte off."""
    store, wanted, dice = open_store(server.url(value_bytes=value_bytes)), make_object(1), random.Random(value_bytes)
    put(store, wanted)
    whole = wanted.rows.tobytes()
    for _ in range(50):
        start = dice.randrange(len(whole))
        into = bytearray(dice.randint(1, len(whole) - start))
        store.read(SPACE, wanted.key, start, memoryview(into))
        assert into == whole[start : start + len(into)]
    store.close()


def test_readers_follow_the_length_of_values_that_the_writer_chose(server):
    writer, reader = (open_store(server.url(value_bytes=length)) for length in (1024, 5000))
    wanted = make_object(1)
    put(writer, wanted)
    assert fault_of(reader, wanted) == ""
    reader.remove(SPACE, wanted.key)
    with server.client() as client:
        assert client.keys("kvgraft:[hb]:*") == []
    writer.close(), reader.close()


def test_two_who_put_unlike_bytes_never_mix_them(server):
    stores = [open_store(server.url(value_bytes=1024)) for _ in range(4)]
    bodies = [np.full(20_000, number, np.uint8) for number in range(4)]
    for round_number in range(10):
        key, start = f"{round_number:032x}", threading.Barrier(4)

        def race(number, key=key, start=start):
            start.wait()
            return stores[number].put(SPACE, key, bytes([number]), bodies[number].data)

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(race, range(4))) == 1
        ((_, head),), into = stores[0].heads(SPACE, [key]), bytearray(20_000)
        stores[0].read(SPACE, key, 0, memoryview(into))
        assert into == bodies[head[0]].tobytes()
    with server.client() as client:
        assert len(client.keys("kvgraft:b:*")) == 10 * 20
    for store in stores:
        store.close()


@pytest.mark.parametrize("ttl_s", [0, 86_400])
def test_a_repeated_publication_is_no_loss(server, ttl_s):
    """The answer to a transaction may be lost and the client sends it again."""
    store, wanted = open_store(server.url(value_bytes=1 << 14, ttl_s=ttl_s)), make_object(1)
    publish = store._publish

    def twice(*arguments):
        publish(*arguments)
        return publish(*arguments)

    store._publish = twice
    assert put(store, wanted) is True
    assert fault_of(store, wanted) == ""
    store.close()


def test_parts_of_a_put_that_failed_are_dropped_or_expire(server, store):
    def fail(*_):
        with server.client() as client:
            names = client.keys("kvgraft:b:*")
            assert names
            assert all(0 < client.ttl(name) <= 600 for name in names)
        raise RuntimeError("the writer dies here")

    store._publish = fail
    with pytest.raises(RuntimeError):
        put(store, make_object(1))
    with server.client() as client:
        assert client.keys("kvgraft:*") == []


@pytest.mark.parametrize(
    ("login", "said"),
    [("", "Authentication required"), (":wr%2Fong@", "invalid username-password"), ("me:wrong@", "invalid username")],
)
def test_a_wrong_password_is_one_clear_line(tmp_path, login, said):
    need_redis()
    with RedisServer(tmp_path, "--requirepass", "s3cret") as server:
        with pytest.raises(ConfigError, match=said) as refused:
            open_store(f"redis://{login}127.0.0.1:{server.port}")
        assert len(str(refused.value).splitlines()) == 1
        assert "wr" not in str(refused.value)
        store = open_store(f"redis://:s3cret@127.0.0.1:{server.port}/1")
        assert "s3cret" not in repr(store)
        server.kill()
        with pytest.raises(StoreError) as failed:
            store.keys(SPACE)
        assert "s3cret" not in str(failed.value)
        store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3/cret@127.0.0.1:6379",
        "redis://:s3#cret@127.0.0.1:6379",
        "redis://:s3?cret@127.0.0.1:6379",
        "redis://127.0.0.1:6379/s3cret",
        "redis://:s3cret@:6379",
        "redis:s3cret",
        "redis://:s3cret@127.0.0.1:1/0?speed",
        "redis://:s3cret@h:1,redis://:s3cret@h:1",
        "unix://?db=0",
    ],
)
def test_what_cannot_be_read_is_said_without_the_password(url):
    from kvgraft.memory.store import open_stores

    need_redis()
    with pytest.raises(ConfigError) as refused:
        open_stores(url)
    assert len(str(refused.value).splitlines()) == 1
    assert "cret@" not in str(refused.value)


@pytest.mark.parametrize("option", ["ttl_s=-1", "timeout_s=0", "value_bytes=1GiB", "speed=1", "prefix="])
def test_options_are_checked(option):
    need_redis()
    with pytest.raises(ConfigError):
        open_store(f"redis://127.0.0.1:1?{option}")


def test_a_server_that_is_not_there_yet_is_waited_for_by_nobody(tmp_path, caplog):
    need_redis()
    server = RedisServer(tmp_path)
    with caplog.at_level(logging.WARNING):
        store = open_store(f"redis://:s3cret@127.0.0.1:{server.port}")
    assert "tried again" in caplog.text
    assert "s3cret" not in caplog.text
    store.close()
    store = open_store(server.url())
    with server:
        assert put(store, make_object(1)) is True
    store.close()


def test_a_socket_of_the_file_system(server):
    store = open_store(f"unix://{server.folder}/socket?db=3")
    put(store, make_object(1))
    with server.client() as client:
        client.select(3)
        assert client.exists(f"kvgraft:h:{SPACE}:{make_object(1).key}")
    store.close()


def test_tls(tmp_path):
    need_redis()
    files = {name: str(tmp_path / name) for name in ("key", "cert")}
    command = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        made = subprocess.run(
            ["openssl", *command, "-keyout", files["key"], "-out", files["cert"]], capture_output=True, check=False
        )
    except FileNotFoundError:
        pytest.skip("openssl is not installed: apt-get install openssl")
    assert made.returncode == 0, made.stderr
    port = free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    for name, path in (("key", files["key"]), ("cert", files["cert"]), ("ca-cert", files["cert"])):
        options += [f"--tls-{name}-file", path]
    with RedisServer(tmp_path, *options):
        store = open_store(f"rediss://127.0.0.1:{port}?ssl_ca_certs={files['cert']}")
        assert put(store, make_object(1)) is True
        assert fault_of(store, make_object(1)) == ""
        store.close()
        stranger = open_store(f"rediss://127.0.0.1:{port}")  # its certificate is not trusted
        raises_in_one_line(lambda: stranger.keys(SPACE))
        stranger.close()


# One level up: the tier never waits.


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("fault", ["hang", "die"])
def test_readers_and_writers_never_wait_for_a_lost_server(server, store, fault):
    wanted, late, clock = make_object(1), make_object(2), Clock()
    put(store, wanted)
    reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20, clock=clock)
    writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=late.rows.nbytes)
    server.pause() if fault == "hang" else server.kill()

    asked = reader.fetch(wanted.key, 0, 300)
    assert asked.wait(PATIENCE_S)
    with pytest.raises(StoreError):
        asked.block()
    assert reader.is_resting
    refused = reader.fetch(wanted.key, 0, 300)
    assert refused.is_done  # at once
    assert (reader.counters.failed, reader.counters.refused) == (1, 1)

    assert writer.offer(late.record, lambda: LAYOUT.unpack(late.rows))
    assert writer.flush(PATIENCE_S)  # given up, while the server is still away
    assert [one.is_stored for one in writer.take_written()] == [False]
    assert writer.counters.failed == 1

    server.resume() if fault == "hang" else server.start()
    put(store, wanted)
    clock.now += 60
    assert not reader.is_resting
    again = reader.fetch(wanted.key, 0, 300)
    assert again.wait(PATIENCE_S)
    assert np.array_equal(LAYOUT.pack(again.block()), wanted.rows)
    assert writer.offer(late.record, lambda: LAYOUT.unpack(late.rows))
    assert writer.flush(PATIENCE_S)
    assert fault_of(store, late) == ""
    reader.close(), writer.close()


def test_a_feed_survives_its_server(server, store):
    first, second = make_object(1), make_object(2)
    put(store, first)
    feed = StoreFeed(store, [SPACE], interval_s=0.05)
    assert feed.look(PATIENCE_S)
    assert [record.key for record in feed.news().added] == [first.key]
    server.kill()
    until(lambda: feed.num_errors)
    assert feed.news().removed == ()  # nobody knows
    server.start()
    put(store, second)
    assert feed.look(PATIENCE_S)
    news = feed.news()
    assert ([record.key for record in news.added], news.removed) == ([second.key], (first.key,))
    feed.close()


def test_the_setting_is_shown_without_its_password(capsys, monkeypatch):
    from kvgraft.cli import main
    from kvgraft.config import EngineConfig

    url = "file:/a,redis://me:s3@cret@127.0.0.1:6379/0"
    assert "cret" not in repr(EngineConfig(store=url))
    monkeypatch.setenv("KVGRAFT_STORE", url)
    main(["config", "show"])
    shown = capsys.readouterr().out
    assert "redis://***@127.0.0.1:6379/0" in shown
    assert "cret" not in shown
