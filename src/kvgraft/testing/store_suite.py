"""Test class for any store of donors: subclass it, build your store in `make_store`, run pytest.

    class TestMine(KVStoreTests):
        def make_store(self, max_bytes):
            return MyStore(max_bytes)

        def url(self, max_bytes):
            return "mine:WHERE"  # how other processes open the same; leave it out if they cannot

A store may lose what it was given; it may never give back anything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest

from kvgraft.errors import CapacityError, StoreError, StoreMissError
from kvgraft.memory.store import open_store
from kvgraft.memory.store.record import space_name
from kvgraft.memory.store.tier import StoreFeed, StoreReader, StoreWriter
from kvgraft.testing.crafted_objects import crafted_objects
from kvgraft.testing.memory_store import Faults, FaultyStore
from kvgraft.testing.stored_objects import LAYOUT, SPACE, StoredObject, fault_of, make_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvgraft.memory.store import KVStore

_PATIENCE_S = 120.0
_ROOM = 64 << 20
_BAD_NAMES = ("", "../a", "a/b", "A", "g", "a b", "é", ".", "a\0")


class KVStoreTests(ABC):
    """Tests of the contract of `KVStore`.

    Attributes:
        big_bytes: Length of the largest object that is tried.
        full_bytes: Limit of the store that is filled up.
        keeps_used: Whether what was touched outlives what was not, exactly.
    """

    big_bytes: ClassVar[int] = 24 << 20
    full_bytes: ClassVar[int] = 1 << 20
    keeps_used: ClassVar[bool] = True

    @abstractmethod
    def make_store(self, max_bytes: int) -> KVStore:
        """Open an empty store that keeps about so many bytes; called at most once per test."""

    def url(self, max_bytes: int) -> str | None:
        """Return the URL by which another process opens the store of `make_store`; None if none can."""
        del max_bytes
        return None

    def damage(self, store: KVStore, key: str, kind: str) -> bool:
        """Damage an object of `SPACE` where it lies; False if that cannot be done.

        Args:
            store: Made by `make_store`.
            key: Of the object.
            kind: `head` or `body` to flip a bit there, `truncated`, `empty` or `foreign`.
        """
        del store, key, kind
        return False

    @pytest.fixture
    def store(self) -> Iterator[KVStore]:
        """A store with room for all that a test puts."""
        store = self.make_store(_ROOM)
        yield store
        store.close()

    def _second(self, max_bytes: int = _ROOM) -> KVStore:
        url = self.url(max_bytes)
        if url is None:
            pytest.skip("a store of one process")
        return open_store(url)

    def test_an_empty_store_has_nothing(self, store: KVStore) -> None:
        """And says so in each way."""
        key = make_object(0).key
        assert store.keys(SPACE) == frozenset()
        assert list(store.heads(SPACE, [key])) == [(key, None)]
        with pytest.raises(StoreMissError):
            store.read(SPACE, key, 0, memoryview(bytearray(1)))
        store.remove(SPACE, key)
        store.touch(SPACE, [key])

    def test_what_was_put_is_there(self, store: KVStore) -> None:
        """Head, body and name, byte for byte."""
        wanted = make_object(1)
        assert put(store, wanted) is True
        assert store.keys(SPACE) == {wanted.key}
        assert fault_of(store, wanted) == ""

    def test_the_first_stays(self, store: KVStore) -> None:
        """Another put under the same key changes nothing."""
        wanted, other = make_object(1), make_object(2)
        put(store, wanted)
        assert put(store, wanted) is False
        assert store.put(SPACE, wanted.key, other.head, other.body) is False
        assert fault_of(store, wanted) == ""

    def test_the_body_is_not_kept_alive(self, store: KVStore) -> None:
        """Its owner may write to it once `put` is back."""
        wanted = make_object(1)
        rows = wanted.rows.copy()
        store.put(SPACE, wanted.key, wanted.head, rows.data.cast("B"))
        rows[:] = 0
        assert fault_of(store, wanted) == ""

    @pytest.mark.parametrize("seed", range(3))
    def test_any_part_can_be_read(self, store: KVStore, seed: int) -> None:
        """Of one byte, of all, at both ends; more than there is is a miss."""
        wanted, dice = make_object(1, 700), random.Random(seed)
        put(store, wanted)
        whole = wanted.rows.tobytes()
        spans = [(0, 1), (0, len(whole)), (len(whole) - 1, 1)]
        for _ in range(20):
            start = dice.randrange(len(whole))
            spans.append((start, dice.randint(1, len(whole) - start)))
        for start, length in spans:
            into = bytearray(length)
            store.read(SPACE, wanted.key, start, memoryview(into))
            assert bytes(into) == whole[start : start + length]
        for start, length in ((0, len(whole) + 1), (len(whole), 1), (len(whole) - 1, 2)):
            with pytest.raises(StoreMissError):
                store.read(SPACE, wanted.key, start, memoryview(bytearray(length)))

    def test_a_read_fills_what_it_is_given_and_no_more(self, store: KVStore) -> None:
        """A part of a larger buffer, in place."""
        wanted, into = make_object(1), np.full((300, LAYOUT.bytes_per_token), 7, np.uint8)
        put(store, wanted)
        store.read(SPACE, wanted.key, 0, into[10:20].data.cast("B"))
        assert np.array_equal(into[10:20], wanted.rows[:10])
        assert (into[:10] == 7).all()
        assert (into[20:] == 7).all()

    def test_what_was_removed_is_gone(self, store: KVStore) -> None:
        """And can be put again; the others stay."""
        first, second = make_object(1), make_object(2)
        put(store, first), put(store, second)
        for _ in range(2):
            store.remove(SPACE, first.key)
            assert fault_of(store, first) == "lost"
            assert store.keys(SPACE) == {second.key}
        with pytest.raises(StoreMissError):
            store.read(SPACE, first.key, 0, memoryview(bytearray(1)))
        assert put(store, first) is True
        assert fault_of(store, first) == fault_of(store, second) == ""

    def test_spaces_know_nothing_of_each_other(self, store: KVStore) -> None:
        """The same key in two is two objects."""
        wanted, other = make_object(1), space_name("another")
        put(store, wanted)
        assert store.keys(other) == frozenset()
        assert list(store.heads(other, [wanted.key])) == [(wanted.key, None)]
        with pytest.raises(StoreMissError):
            store.read(other, wanted.key, 0, memoryview(bytearray(1)))
        elsewhere = make_object(1, space=other)
        assert store.put(other, elsewhere.key, elsewhere.head, elsewhere.body) is True
        store.remove(other, elsewhere.key)
        assert fault_of(store, wanted) == ""

    def test_heads_come_in_batches(self, store: KVStore) -> None:
        """All that were asked for, each with its own, those that are not there among them; of none, none."""
        objects = [make_object(number, 20) for number in range(100)]
        for wanted in objects[::2]:
            put(store, wanted)
        expected = {wanted.key: wanted.head if place % 2 == 0 else None for place, wanted in enumerate(objects)}
        found = list(store.heads(SPACE, list(expected)))
        assert len(found) == 100
        assert dict(found) == expected
        assert list(store.heads(SPACE, [])) == []
        assert store.keys(SPACE) == {key for key, head in expected.items() if head}

    def test_long_texts_have_long_heads(self, store: KVStore) -> None:
        """These do not fit into a first small read."""
        wanted = make_object(1, 20_000)
        put(store, wanted)
        assert fault_of(store, wanted) == ""

    def test_a_big_object(self, store: KVStore) -> None:
        """Whole, and at its ends."""
        wanted = make_object(1, self.big_bytes // LAYOUT.bytes_per_token)
        put(store, wanted)
        assert fault_of(store, wanted) == ""

    @pytest.mark.parametrize("name", _BAD_NAMES)
    def test_names_that_could_lead_elsewhere_are_refused(self, store: KVStore, name: str) -> None:
        """In one line, as space and as key."""
        wanted, into = make_object(1), memoryview(bytearray(1))
        for space, key in ((name, wanted.key), (SPACE, name)):
            for call in (
                lambda space=space, key=key: store.put(space, key, wanted.head, wanted.body),
                lambda space=space, key=key: store.read(space, key, 0, into),
                lambda space=space, key=key: list(store.heads(space, [key])),
                lambda space=space, key=key: store.remove(space, key),
            ):
                with pytest.raises(StoreError) as refused:
                    call()
                assert len(str(refused.value).splitlines()) == 1
                assert not isinstance(refused.value, StoreMissError)

    def test_a_full_store_keeps_to_its_limit(self) -> None:
        """By losing objects or by refusing them; what it has is right."""
        store = self.make_store(self.full_bytes)
        objects = [make_object(number, 500) for number in range(3 * self.full_bytes // (500 * LAYOUT.bytes_per_token))]
        for wanted in objects:
            try_to_put(store, wanted)
        faults = [fault_of(store, wanted) for wanted in objects]
        assert set(faults) == {"", "lost"}
        assert (
            sum(wanted.num_bytes for wanted, fault in zip(objects, faults, strict=True) if not fault) <= self.full_bytes
        )
        store.close()

    def test_more_than_a_store_can_hold_is_refused(self) -> None:
        """And does not drive out what is there."""
        store = self.make_store(self.full_bytes)
        small, large = make_object(1), make_object(2, 2 * self.full_bytes // LAYOUT.bytes_per_token)
        put(store, small)
        with pytest.raises(CapacityError) as refused:
            put(store, large)
        assert len(str(refused.value).splitlines()) == 1
        assert fault_of(store, small) == ""
        assert fault_of(store, large) == "lost"
        store.close()

    def test_what_is_used_outlives_what_is_not(self) -> None:
        """Use is what `touch` says."""
        if not self.keeps_used:
            pytest.skip("this store decides otherwise")
        store = self.make_store(self.full_bytes)
        used = make_object(0, 500)
        put(store, used)
        for number in range(1, 3 * self.full_bytes // (500 * LAYOUT.bytes_per_token)):
            store.touch(SPACE, [used.key])
            try_to_put(store, make_object(number, 500))
        assert fault_of(store, used) == ""
        store.close()

    def test_one_of_many_threads_puts_an_object(self, store: KVStore) -> None:
        """The others hear that it is there; it is whole."""
        wanted = make_object(1, 2_000)
        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda _: put(store, wanted), range(16)))
        assert any(results)
        assert fault_of(store, wanted) == ""
        assert put(store, wanted) is False

    def test_threads_in_any_order(self, store: KVStore) -> None:
        """Each read is right or a miss while others put and remove."""
        objects = [make_object(number) for number in range(6)]

        def work(seed: int) -> int:
            dice, reads = random.Random(seed), 0
            for _ in range(60):
                wanted, choice = dice.choice(objects), dice.random()
                if choice < 0.4:
                    put(store, wanted)
                elif choice < 0.5:
                    store.remove(SPACE, wanted.key)
                elif choice < 0.6:
                    assert store.keys(SPACE) <= {one.key for one in objects}
                else:
                    reads += read_or_miss(store, wanted, dice)
            return reads

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(work, range(4))) > 0
        assert {fault_of(store, wanted) for wanted in objects} <= {"", "lost"}

    @pytest.mark.parametrize("seed", range(2))
    def test_operations_in_any_order(self, store: KVStore, seed: int) -> None:
        """Compared with a dictionary."""
        dice, objects = random.Random(seed), [make_object(number, 30 + 40 * number) for number in range(12)]
        kept: set[str] = set()
        for _ in range(200):
            wanted, choice = dice.choice(objects), dice.random()
            if choice < 0.4:
                assert put(store, wanted) is (wanted.key not in kept)
                kept.add(wanted.key)
            elif choice < 0.6:
                store.remove(SPACE, wanted.key)
                kept.discard(wanted.key)
            elif choice < 0.7:
                store.touch(SPACE, [one.key for one in dice.sample(objects, 3)])
            elif choice < 0.8:
                assert store.keys(SPACE) == kept
            else:
                assert read_or_miss(store, wanted, dice) is (wanted.key in kept)

    def test_another_process_has_it_too(self, store: KVStore) -> None:
        """Opened anew, what was put is there; what the other removes is gone."""
        wanted = make_object(1)
        put(store, wanted)
        second = self._second()
        assert second.keys(SPACE) == {wanted.key}
        assert fault_of(second, wanted) == ""
        assert put(second, wanted) is False
        second.remove(SPACE, wanted.key)
        assert fault_of(store, wanted) == "lost"
        with pytest.raises(StoreMissError):
            store.read(SPACE, wanted.key, 0, memoryview(bytearray(1)))
        second.close()

    def test_processes_put_at_once(self, store: KVStore) -> None:
        """The same and others; nothing is lost or mixed up."""
        children = [self._child(first, 30) for first in (0, 20)]
        for child in children:
            _, errors = child.communicate(timeout=_PATIENCE_S)
            assert (child.returncode, errors) == (0, "")
        assert {fault_of(store, make_object(number)) for number in range(50)} == {""}

    def test_a_process_that_is_killed_leaves_nothing_half(self, store: KVStore) -> None:
        """What it reported as kept is kept; other objects are whole, or go when they are put again."""
        child = self._child(0, 10_000)
        assert child.stdout is not None
        kept = [int(child.stdout.readline()) for _ in range(5)]
        child.send_signal(signal.SIGKILL)
        kept += [int(line) for line in child.stdout]  # `communicate` would miss the lines that are buffered already
        child.communicate(timeout=_PATIENCE_S)
        assert {fault_of(store, make_object(number)) for number in kept} == {""}
        under_way = make_object(max(kept) + 1)
        assert fault_of(store, under_way) in ("", "lost")
        put(store, under_way)
        assert fault_of(store, under_way) == ""
        assert len(store.keys(SPACE)) == max(kept) + 2

    def test_the_tier_writes_and_reads_it(self, store: KVStore) -> None:
        """Write in the background, then read a span."""
        wanted = make_object(1, 700)
        writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=1 << 20)
        writer.offer(wanted.record, lambda: LAYOUT.unpack(wanted.rows))
        assert writer.flush(_PATIENCE_S)
        assert [one.is_stored for one in writer.take_written()] == [True]
        writer.close()
        with reading(store) as reader:
            fetch = reader.fetch(wanted.key, 255, 300)
            assert fetch.wait(_PATIENCE_S)
            assert np.array_equal(LAYOUT.pack(fetch.block()), wanted.rows[255:555])
            assert reader.counters.hits == 1

    @pytest.mark.parametrize("kind", ["head", "body", "truncated", "empty", "foreign"])
    def test_damage_is_found(self, store: KVStore, kind: str) -> None:
        """By the tier on top: a counted miss, and the object goes, so that it can be put again."""
        wanted = make_object(1, 700)
        put(store, wanted)
        if not self.damage(store, wanted.key, kind):
            pytest.skip("nothing can damage this medium")
        with reading(self._second() if self.url(_ROOM) else store) as reader:
            fetch = reader.fetch(wanted.key, 0, 700)
            assert fetch.wait(_PATIENCE_S)
            with pytest.raises(StoreError):
                fetch.block()
            assert (reader.counters.hits, reader.counters.corrupt + reader.counters.missing) == (0, 1)
        assert fault_of(store, wanted) == "lost"
        assert put(store, wanted) is True
        assert fault_of(store, wanted) == ""

    @pytest.mark.parametrize("seed", range(2))
    def test_no_crafted_object_hides_another(self, store: KVStore, seed: int) -> None:
        """Each kind by itself among good ones: the feed reports these; the other is counted, never read, and goes."""
        good = {
            put_object.key for put_object in (make_object(number, 20) for number in range(4)) if put(store, put_object)
        }
        body, hidden = make_object(77, 20).body, []
        for crafted in crafted_objects(seed):
            assert store.put(SPACE, crafted.key, crafted.head, body) is True
            with feeding(store) as feed:
                if not feed.look(_PATIENCE_S) or {record.key for record in feed.news(1_000).added} != good:
                    hidden.append(crafted.kind)
                elif feed.num_corrupt != 1 or store.keys(SPACE) != good:
                    hidden.append(f"{crafted.kind} stays")
            store.remove(SPACE, crafted.key)
        assert not hidden, hidden

    def test_no_crafted_object_is_read_or_kept_from_being_written(self, store: KVStore) -> None:
        """A read of its name is a counted miss; an engine with that donor writes it again."""
        wanted = make_object(1, 20)
        for crafted in crafted_objects():
            store.put(SPACE, wanted.key, crafted.head, wanted.body)
            with reading(store) as reader:
                fetch = reader.fetch(wanted.key, 0, 20)
                assert fetch.wait(_PATIENCE_S)
                counters = reader.counters
                assert (counters.hits, counters.corrupt, counters.failed) == (0, 1, 0), crafted.kind
            store.put(SPACE, wanted.key, crafted.head, wanted.body)
            writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=1 << 20)
            writer.offer(wanted.record, lambda: LAYOUT.unpack(wanted.rows))
            assert writer.flush(_PATIENCE_S)
            writer.close()
            assert (writer.counters.stored, fault_of(store, wanted)) == (1, ""), crafted.kind
            store.remove(SPACE, wanted.key)

    @pytest.mark.parametrize("method", ["heads", "read"])
    @pytest.mark.parametrize("fault", ["corrupt", "truncate", "lose", "fail"])
    def test_faults_on_the_way_are_counted_misses(self, store: KVStore, fault: str, method: str) -> None:
        """And nothing of it is served."""
        wanted, faults = make_object(1, 700), Faults()
        put(store, wanted)
        getattr(faults, fault).add(method)
        with reading(FaultyStore(store, faults)) as reader:
            fetch = reader.fetch(wanted.key, 0, 700)
            assert fetch.wait(_PATIENCE_S)
            with pytest.raises(StoreError):
                fetch.block()
            counters = reader.counters
            assert (counters.hits, counters.missing + counters.corrupt + counters.failed) == (0, 1)

    def test_a_slow_store_holds_nobody_up(self, store: KVStore) -> None:
        """Who asks goes on at once; what comes late is still right."""
        wanted, faults = make_object(1), Faults(hang={"read"})
        put(store, wanted)
        with reading(FaultyStore(store, faults)) as reader:
            fetch = reader.fetch(wanted.key, 0, 300)
            assert not fetch.is_done
            faults.released.set()
            assert fetch.wait(_PATIENCE_S)
            assert np.array_equal(LAYOUT.pack(fetch.block()), wanted.rows)

    def test_nothing_is_left_open(self) -> None:
        """Neither files nor threads, also after failures."""
        store, wanted = self.make_store(_ROOM), make_object(1)
        url = self.url(_ROOM)
        before = _open_things() if url else None
        for _ in range(5):
            second = open_store(url) if url else store
            put(second, wanted)
            assert fault_of(second, wanted) == ""
            with pytest.raises(StoreMissError):
                second.read(SPACE, wanted.key, 1 << 40, memoryview(bytearray(1)))
            second.remove(SPACE, wanted.key)
            if url:
                second.close()
        gc.collect()
        if before is not None:
            files, threads = _open_things()
            assert files <= before[0]
            assert threads <= before[1]
        store.close()

    def _child(self, first: int, count: int) -> subprocess.Popen[str]:
        url = self.url(_ROOM)
        if url is None:
            pytest.skip("a store of one process")
        command = [sys.executable, "-m", "kvgraft.testing.stored_objects", url, str(first), str(count)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def reading(store: KVStore) -> Iterator[StoreReader]:
    """Give a reader of `SPACE`, closed at the end."""
    reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 26)
    try:
        yield reader
    finally:
        reader.close()


@contextlib.contextmanager
def feeding(store: KVStore) -> Iterator[StoreFeed]:
    """Give a feed of `SPACE` that looks on demand, closed at the end."""
    feed = StoreFeed(store, [SPACE], interval_s=3_600.0)
    try:
        yield feed
    finally:
        feed.close()


def put(store: KVStore, wanted: StoredObject) -> bool:
    """Put an object into `SPACE`."""
    return store.put(SPACE, wanted.key, wanted.head, wanted.body)


def try_to_put(store: KVStore, wanted: StoredObject) -> None:
    """Put an object that the store may refuse because it is full."""
    try:
        put(store, wanted)
    except CapacityError:
        return


def read_or_miss(store: KVStore, wanted: StoredObject, dice: random.Random) -> bool:
    """Read a part and compare it; False if it is not there."""
    first = dice.randrange(wanted.rows.shape[0])
    expected = wanted.rows[first : dice.randint(first, wanted.rows.shape[0] - 1) + 1]
    into = np.empty_like(expected)
    try:
        store.read(SPACE, wanted.key, first * wanted.rows.shape[1], into.data.cast("B"))
    except StoreMissError:
        return False
    assert np.array_equal(into, expected), "a store gave back what was never put"
    return True


def _open_things() -> tuple[int, int]:
    return len(list(Path("/proc/self/fd").iterdir())) if os.path.isdir("/proc/self/fd") else 0, threading.active_count()
