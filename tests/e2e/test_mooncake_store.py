"""What a real Mooncake master does to donors: dies, hangs, comes late. Skipped where Mooncake is not installed."""

from __future__ import annotations

import collections
import random
import signal
import subprocess
import sys
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


def read_by(reader, wanted):
    """What a reader gets: "right", "wrong", which must never be, or "missed"."""
    fetch = reader.fetch(wanted.key, 0, 300)
    assert fetch.wait(PATIENCE_S)
    try:
        return "right" if np.array_equal(LAYOUT.pack(fetch.block()), wanted.rows) else "wrong"
    except StoreError:
        return "missed"


READS = """
import sys, tests.e2e.test_mooncake_store as own
store = own.open_store(sys.argv[1])
for number in range(10**9):
    reader = own.StoreReader(store, own.SPACE, own.LAYOUT, max_pending_bytes=1 << 20)  # one that failed would rest
    print(own.read_by(reader, own.make_object(number % 8)), flush=True)
    reader.close()
"""


def test_a_reader_that_is_slower_than_its_lease_reads_nothing_wrong(tmp_path):
    """Mooncake#850, #3076, #849, #1336: a get that is slower than its lease returns other bytes.

    Here a reader with leases of a millisecond is stopped again and again while what it reads is replaced: right or missed.
    """
    need_mooncake()
    with MooncakeMaster(tmp_path, "--default_kv_lease_ttl=1") as master:
        store, objects = opened(master), [make_object(number) for number in range(8)]
        url = master.url(segment_bytes=0, buffer_bytes="3MiB", timeout_s=2)
        command = [sys.executable, "-c", READS, url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            try:
                seen = collections.Counter()
                for number in range(12):
                    child.send_signal(signal.SIGSTOP)
                    for wanted in objects:  # in another order, so that each lies where another one lay
                        eventually(lambda wanted=wanted: store.remove(SPACE, wanted.key))
                    for wanted in random.Random(number).sample(objects, len(objects)):
                        eventually(lambda wanted=wanted: put(store, wanted))
                    child.send_signal(signal.SIGCONT)
                    lines = (child.stdout.readline().strip() for _ in range(40))
                    seen.update(lines)
            finally:
                child.kill()
        store.close()
    assert seen.keys() <= {"right", "missed"}
    assert seen["right"] > 10


def test_a_master_that_restarts_beneath_its_clients_makes_nothing_wrong(master):
    """Mooncake#4239: a master that was started anew gives memory away in which objects of before are still read."""
    store, seen = opened(master), collections.Counter()
    reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20)
    for round_number in range(3):
        objects = [make_object(100 * round_number + number) for number in range(20)]
        for wanted in objects:
            assert eventually(lambda wanted=wanted: put(store, wanted))
        master.kill()
        seen.update(read_by(reader, wanted) for wanted in objects)
        master.start()
        for wanted in [make_object(100 * round_number + 50 + number) for number in range(20)]:
            eventually(lambda wanted=wanted: put(store, wanted))
        seen.update(read_by(reader, wanted) for wanted in objects)
    assert seen.keys() <= {"right", "missed"}
    reader.close(), store.close()


DIES = """
import sys
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
assert not client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", sys.argv[1])
value = bytes(200 << 20)
print("ready", flush=True)
client.put(sys.argv[2], value)
print("done", flush=True)
"""


def test_what_a_killed_writer_left_open_is_not_taken_for_an_object(tmp_path):
    """Mooncake#4239, #1336: a writer that is killed in the middle of a put blocks the key.

    Mooncake says that a put of that name has succeeded, and there is nothing. Here it is a failure, no donor that is known,
    and the key can be written once the master has let go of it.
    """
    need_mooncake()
    quick = ("--put_start_discard_timeout_sec=3", "--put_start_release_timeout_sec=4")
    with MooncakeMaster(tmp_path, "--default_kv_lease_ttl=500", *quick) as master:
        store = opened(master, segment_bytes="512MiB")
        whole_s, client = None, store._client
        for number in range(60):
            wanted = make_object(number)
            name = f"kvgraft:h:{SPACE}:{wanted.key}"
            command = [sys.executable, "-c", DIES, f"127.0.0.1:{master.port}", name]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
                assert child.stdout.readline() == "ready\n"
                began = time.monotonic()
                if whole_s is None:
                    assert child.stdout.readline() == "done\n"
                    whole_s = time.monotonic() - began
                    client.remove(name, True)
                else:  # ever later in the course of a put, over and over
                    time.sleep(whole_s * (0.5 + number * 7 % 30 / 60))
                child.kill()
            if number and not client.is_exist(name) and client.put(name, b"x") == 0 and not client.is_exist(name):
                break
        else:
            raise AssertionError("no writer was killed in the middle of a put")
        with pytest.raises(StoreError, match="has not finished"):
            put(store, wanted)
        assert fault_of(store, wanted) == "lost"
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


class OpenName:
    """Says of every put that it succeeded, as Mooncake does of a name that another put holds; nothing is ever there."""

    def is_exist(self, name):
        return 0

    def put_from(self, name, place, length):
        return 0

    def get_into_ranges(self, places, names, *ranges):
        return [[[-704]]]

    def batch_is_exist(self, names):
        return [1] * len(names)

    def batch_remove(self, names, force):
        return [0] * len(names)


def test_a_name_that_stays_open_is_a_write_that_failed():
    store = MooncakeStore(OpenName, "127.0.0.1", 1, MooncakeOptions(timeout_s=PATIENCE_S))
    store._client = OpenName()
    with pytest.raises(StoreError, match="has not finished"):
        put(store, make_object(1))
    store._client = None
    store.close()


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
