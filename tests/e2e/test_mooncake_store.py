"""What a real Mooncake master does to donors: dies, hangs, comes late. Skipped where Mooncake is not installed."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from tests.store_servers import PATIENCE_S, MooncakeMaster, need_mooncake

from kvgraft.errors import CapacityError, ConfigError, StoreError, StoreMissError
from kvgraft.memory.store import open_store
from kvgraft.memory.store.lanes import Lanes
from kvgraft.memory.store.mooncake import MooncakeOptions, MooncakeStore
from kvgraft.memory.store.tier import StoreReader
from kvgraft.testing.stored_objects import LAYOUT, SPACE, fault_of, make_object


@pytest.fixture
def master(tmp_path):
    need_mooncake()
    with MooncakeMaster(tmp_path, "--default_kv_lease_ttl=500") as running:
        yield running


def opened(master, **options):
    return open_store(master.url(**{"segment_bytes": "32MiB", "buffer_bytes": "3MiB", "timeout_s": 2, **options}))


def put(store, wanted):
    return store.put(SPACE, wanted.key, wanted.head, wanted.body)


def eventually(call):
    """What `call` returns once it does not fail any more."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (StoreError, CapacityError):
            assert time.monotonic() < end
            time.sleep(0.1)


def test_a_master_that_died_comes_back_empty(master):
    store, wanted = opened(master), make_object(1)
    put(store, wanted)
    master.kill()
    for call in (
        lambda: store.keys(SPACE),
        lambda: list(store.heads(SPACE, [wanted.key])),
        lambda: store.read(SPACE, wanted.key, 0, memoryview(bytearray(10))),
    ):
        with pytest.raises(StoreError) as raised:
            call()
        assert len(str(raised.value).splitlines()) == 1
        assert not isinstance(raised.value, StoreMissError)
    master.start()
    assert eventually(lambda: fault_of(store, wanted)) == "lost"
    assert eventually(lambda: put(store, wanted)) is True
    assert fault_of(store, wanted) == ""
    store.close()


def test_a_master_that_hangs_is_waited_for_no_longer_than_the_deadline(master):
    """Each call comes back while it still hangs, also when more hang than there are lanes; then all goes on."""
    store, wanted, into = opened(master, timeout_s=0.5), make_object(1), bytearray(28_800)
    put(store, wanted)
    master.pause()
    for _ in range(5):
        with pytest.raises(StoreError):
            list(store.heads(SPACE, [wanted.key]))
    with pytest.raises(StoreError):
        store.keys(SPACE)
    master.resume()
    eventually(lambda: store.read(SPACE, wanted.key, 0, memoryview(into)))
    assert into == wanted.rows.tobytes()
    store.close()


def test_readers_never_wait_for_a_master_that_hangs(master):
    store, wanted = opened(master, timeout_s=0.5), make_object(1)
    put(store, wanted)
    reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20)
    master.pause()
    asked = reader.fetch(wanted.key, 0, 300)
    assert asked.wait(PATIENCE_S)
    with pytest.raises(StoreError):
        asked.block()
    assert reader.counters.failed == 1
    master.resume()

    def again():
        fetch = reader.fetch(wanted.key, 0, 300)
        assert fetch.wait(PATIENCE_S)
        return fetch.block()

    assert np.array_equal(LAYOUT.pack(eventually(again)), wanted.rows)
    reader.close(), store.close()


def test_a_master_that_comes_late(tmp_path, caplog):
    need_mooncake()
    master, wanted = MooncakeMaster(tmp_path), make_object(1)
    store = opened(master)
    assert "tried again" in caplog.text
    with pytest.raises(StoreError):
        put(store, wanted)
    with master:
        assert eventually(lambda: put(store, wanted)) is True
        assert fault_of(store, wanted) == ""
        store.close()


def test_without_memory_that_is_lent_the_message_says_so(master):
    store = opened(master, segment_bytes=0)
    with pytest.raises(CapacityError, match="segment_bytes"):
        put(store, make_object(1))
    store.close()


def test_bodies_lie_in_several_values(master):
    store, wanted, dice = opened(master), make_object(1, 30_000), random.Random(3)  # 2.9 MB, values of 1 MiB
    assert put(store, wanted) is True
    whole = wanted.rows.tobytes()
    for _ in range(20):
        start = dice.randrange(len(whole))
        into = bytearray(dice.randint(1, len(whole) - start))
        store.read(SPACE, wanted.key, start, memoryview(into))
        assert into == whole[start : start + len(into)]
    store.remove(SPACE, wanted.key)
    assert b"kvgraft:" not in store._admin("/get_all_keys")
    store.close()


def test_a_head_without_its_body_goes(master):
    store, wanted = opened(master), make_object(1)
    put(store, wanted)
    (body,) = (name for name in store._admin("/get_all_keys").decode().split() if name.startswith("kvgraft:b:"))
    assert store._client.remove(body, True) == 0
    with pytest.raises(StoreMissError):
        store.read(SPACE, wanted.key, 0, memoryview(bytearray(10)))
    assert store.keys(SPACE) == frozenset()
    assert put(store, wanted) is True
    store.close()


@pytest.mark.parametrize(
    "url",
    ["mooncake:", "mooncake://127.0.0.1", "mooncake://h:x", "mooncake://h:1?speed=1", "mooncake://h:1?protocol=pigeon"],
)
def test_what_cannot_be_read_is_said(url):
    with pytest.raises(ConfigError) as refused:
        open_store(url)
    assert len(str(refused.value).splitlines()) == 1


def test_lanes_come_back_when_their_call_does():
    lanes, gate = Lanes("test", 2, 16), threading.Event()
    for _ in range(2):
        with pytest.raises(StoreError, match="no answer within"), lanes.one(0.05) as lane:
            lane.call(gate.wait, 0.05)
    with pytest.raises(StoreError, match="no call of before"), lanes.one(0.05):
        pass
    gate.set()
    with lanes.one(PATIENCE_S) as first, lanes.one(PATIENCE_S) as second:
        assert first.call(lambda: 1, PATIENCE_S) + second.call(lambda: 2, PATIENCE_S) == 3
        with pytest.raises(ZeroDivisionError):
            first.call(lambda: 1 // 0, PATIENCE_S)
    lanes.close()


class FakeClient:
    """Notes whether it is closed while a call is under way."""

    def __init__(self):
        self.gate, self.running, self.closed_with = threading.Event(), 0, []

    def batch_is_exist(self, names):
        self.running += 1
        self.gate.wait(PATIENCE_S)
        self.running -= 1
        return [0] * len(names)

    def close(self):
        self.closed_with.append(self.running)


@pytest.mark.parametrize("comes_back", [True, False])
def test_the_client_is_not_closed_under_a_call_that_came_too_late(comes_back):
    """Mooncake's own crashes the process then."""
    client = FakeClient()
    store = MooncakeStore(lambda: client, "127.0.0.1", 1, MooncakeOptions(timeout_s=0.2))
    store._client = client
    with pytest.raises(StoreError, match="no answer"):
        store.touch(SPACE, ["0" * 32])
    assert client.running == 1
    if comes_back:
        threading.Timer(0.05, client.gate.set).start()
        store._timeout_s = PATIENCE_S
    store.close()
    assert client.closed_with == ([0] if comes_back else [])
    client.gate.set()
    store.close()
