"""The client that never waits: what it writes, reads and sees, how it counts, and what it does when a store fails."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvgraft.errors import StoreError, StoreMissError
from kvgraft.memory.store.checksums import page_checksums
from kvgraft.memory.store.record import MOST_TOKENS, encode_head
from kvgraft.memory.store.tier import ReadSpeed, StoreFeed, StoreReader, StoreWriter
from kvgraft.memory.store.tier.tasks import TaskThreads
from kvgraft.memory.store.tier.touches import Touches
from kvgraft.testing.memory_store import Faults, FaultyStore, MemoryStore
from kvgraft.testing.stored_objects import LAYOUT, SPACE, make_object

PATIENCE_S = 60.0


@pytest.fixture
def faults():
    return Faults()


@pytest.fixture
def memory():
    return MemoryStore()


@pytest.fixture
def store(memory, faults):
    store = FaultyStore(memory, faults)
    yield store
    store.close()


def put(store, number, num_tokens=700):
    wanted = make_object(number, num_tokens)
    store.put(SPACE, wanted.key, wanted.head, wanted.body)
    return wanted


class ReadOnlyStore(FaultyStore):
    """Nothing can be removed, and some heads cannot be read: a volume that is mounted so, files of another user."""

    def __init__(self, store, unreadable=(), error=StoreError):
        super().__init__(store)
        self.unreadable = unreadable
        self.error = error

    def remove(self, space, key):
        raise StoreError("read-only file system")

    def heads(self, space, keys):
        for key in keys:
            if key in self.unreadable:
                raise self.error(f"permission denied: {key}")
            yield from self.store.heads(space, [key])


def calls_of(store, monkeypatch):
    """Names of the methods that are called."""
    calls = []
    for name in ("heads", "read", "put", "remove"):
        real = getattr(store, name)
        monkeypatch.setattr(store, name, lambda *a, name=name, real=real: calls.append(name) or real(*a))
    return calls


@pytest.fixture
def no_threads(monkeypatch):
    """The machine has no thread left; inside `with no_threads():`."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    @contextlib.contextmanager
    def patched():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            yield

    return patched


class TestReader:
    @pytest.fixture
    def clock(self):
        return [0.0]

    @pytest.fixture
    def reader(self, store, clock):
        reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20, clock=lambda: clock[0])
        yield reader
        reader.close()

    def get(self, reader, wanted, start=0, length=None):
        fetch = reader.fetch(wanted.key, start, wanted.record.num_tokens - start if length is None else length)
        assert fetch.wait(PATIENCE_S)
        return LAYOUT.pack(fetch.block())

    def missed(self, reader, wanted, **where):
        with pytest.raises(StoreError) as raised:
            self.get(reader, wanted, **where)
        return raised.value

    @pytest.mark.parametrize(
        ("start", "length"), [(0, 1), (0, 700), (255, 2), (256, 256), (511, 189), (699, 1), (300, 5)]
    )
    def test_spans_of_any_place(self, reader, store, start, length):
        wanted = put(store, 1)
        assert np.array_equal(self.get(reader, wanted, start, length), wanted.rows[start : start + length])
        assert (reader.counters.hits, reader.counters.num_bytes) == (1, length * LAYOUT.bytes_per_token)

    def test_a_read_for_which_there_is_no_thread_fails_and_holds_nothing(self, reader, store, no_threads):
        wanted = put(store, 1)
        idle = reader.expected_s(700)
        with no_threads():
            assert "no thread can be started" in str(self.missed(reader, wanted))
        assert reader.counters.refused == 1
        assert reader.expected_s(700) == idle, "it is not on its way for good"
        assert np.array_equal(self.get(reader, wanted), wanted.rows)

    def test_only_the_pages_of_a_span_are_read(self, reader, store, monkeypatch):
        wanted, ranges = put(store, 1), []
        real = store.read
        monkeypatch.setattr(store, "read", lambda s, k, o, into: ranges.append((o, len(into))) or real(s, k, o, into))
        self.get(reader, wanted, 300, 300)
        self.get(reader, wanted, 600, 100)
        row = LAYOUT.bytes_per_token
        assert ranges == [(256 * row, (700 - 256) * row), (512 * row, (700 - 512) * row)]

    def test_a_head_is_read_once(self, reader, store, monkeypatch):
        wanted = put(store, 1)
        calls = calls_of(store, monkeypatch)
        for _ in range(3):
            self.get(reader, wanted)
        assert calls == ["heads", "read", "read", "read"]

    def test_what_was_put_anew_is_judged_by_its_own_head(self, reader, store, memory):
        """The K/V of a text that was computed twice may differ in their last bits, and so do the checksums."""
        wanted = put(store, 1)
        self.get(reader, wanted)
        rows = LAYOUT.pack(LAYOUT.unpack(np.roll(wanted.rows, 1, axis=0)))
        head = encode_head(
            wanted.record, SPACE, LAYOUT.description, LAYOUT.bytes_per_token, page_checksums(rows, wanted.key)
        )
        memory.remove(SPACE, wanted.key)
        memory.put(SPACE, wanted.key, head, rows.data.cast("B"))
        assert np.array_equal(self.get(reader, wanted), rows)
        assert (reader.counters.hits, reader.counters.corrupt) == (2, 0)

    def test_what_is_gone_is_missing(self, reader, store):
        wanted = put(store, 1)
        assert isinstance(self.missed(reader, make_object(2)), StoreMissError)
        self.get(reader, wanted)
        store.remove(SPACE, wanted.key)
        assert isinstance(self.missed(reader, wanted), StoreMissError)
        assert (reader.counters.hits, reader.counters.missing) == (1, 2)
        assert not reader.is_resting

    def test_more_than_there_is_is_missing_and_nothing_goes(self, reader, store):
        wanted = put(store, 1)
        assert isinstance(self.missed(reader, wanted, start=600, length=200), StoreMissError)
        assert store.keys(SPACE) == {wanted.key}

    @pytest.mark.parametrize("method", ["heads", "read"])
    def test_what_is_corrupt_is_counted_and_goes(self, reader, store, faults, method):
        wanted = put(store, 1)
        faults.corrupt.add(method)
        self.missed(reader, wanted)
        assert (reader.counters.hits, reader.counters.corrupt) == (0, 1)
        assert store.keys(SPACE) == frozenset()
        assert not reader.is_resting, "a damaged object says nothing about the store"

    def test_what_is_corrupt_and_cannot_go_is_read_once(self, memory, monkeypatch):
        """Each read costs what a good one costs."""
        wanted, good = put(memory, 1), put(memory, 2)
        head, body = memory.objects[SPACE, wanted.key]
        memory.objects[SPACE, wanted.key] = head, bytes(len(body))
        store = ReadOnlyStore(memory)
        calls = calls_of(store, monkeypatch)
        reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20)
        self.missed(reader, wanted)
        num_calls = len(calls)
        for _ in range(4):
            assert isinstance(self.missed(reader, wanted), StoreMissError)
        assert len(calls) == num_calls
        assert (reader.counters.corrupt, reader.counters.missing) == (1, 4)
        assert np.array_equal(self.get(reader, good), good.rows)
        reader.close()

    def test_another_layout_is_corrupt(self, reader, memory):
        wanted = make_object(1)
        head = encode_head(wanted.record, SPACE, "other", 64, np.zeros(2, np.uint64))
        memory.put(SPACE, wanted.key, head, memoryview(bytes(300 * 64)))
        self.missed(reader, wanted)
        assert reader.counters.corrupt == 1

    def test_pages_that_changed_places_do_not_pass(self, reader, memory):
        wanted = make_object(1, 512)
        rows = np.concatenate([wanted.rows[256:], wanted.rows[:256]])
        memory.put(SPACE, wanted.key, wanted.head, rows.data.cast("B"))
        self.missed(reader, wanted)
        assert reader.counters.corrupt == 1

    def test_pages_of_another_donor_do_not_pass(self, reader, memory):
        one, other = make_object(1, 256), make_object(2, 256)
        sums = page_checksums(other.rows, other.key)
        head = encode_head(one.record, SPACE, LAYOUT.description, LAYOUT.bytes_per_token, sums)
        memory.put(SPACE, one.key, head, other.body)
        self.missed(reader, one)
        assert reader.counters.corrupt == 1

    def test_a_store_that_fails_is_left_alone_longer_and_longer(self, reader, store, faults, clock):
        wanted = put(store, 1)
        faults.fail = {"read"}
        rests = []
        for _ in range(12):
            self.missed(reader, wanted)
            assert reader.is_resting
            assert reader.expected_s(10) == float("inf")
            begun = clock[0]
            while reader.is_resting:
                assert "not asked" in str(self.missed(reader, wanted))
                clock[0] += 0.05
            rests.append(clock[0] - begun)
        assert rests[:3] == pytest.approx([0.1, 0.2, 0.4], abs=0.06)
        assert rests[-2:] == pytest.approx([30, 30], abs=0.1)
        assert reader.is_failing, "between two tries, too"
        assert (reader.counters.failed, reader.counters.hits) == (12, 0)
        faults.fail = set()
        self.get(reader, wanted)
        faults.fail = {"read"}
        self.missed(reader, wanted)
        clock[0] += 0.11
        assert not reader.is_resting, "a success begins anew"

    def test_too_much_under_way_is_refused(self, store, faults):
        wanted = put(store, 1)
        reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1_000 * LAYOUT.bytes_per_token)
        faults.hang = {"read"}
        first = reader.fetch(wanted.key, 0, 700)
        second = reader.fetch(wanted.key, 0, 700)
        assert (first.is_done, second.is_done) == (False, True)
        assert reader.counters.refused == 1
        assert not first.wait(0.0)
        with pytest.raises(StoreError, match="not arrived"):
            first.block()
        faults.released.set()
        assert first.wait(PATIENCE_S)
        assert np.array_equal(self.get(reader, wanted), wanted.rows)
        reader.close()

    def test_one_that_is_larger_than_the_limit_is_read_alone(self, store):
        wanted = put(store, 1)
        reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=10)
        assert np.array_equal(self.get(reader, wanted), wanted.rows)
        reader.close()

    def test_what_nobody_wants_is_not_read(self, reader, store, faults, monkeypatch):
        wanted = put(store, 1)
        faults.hang = {"heads"}
        busy = [reader.fetch(wanted.key, 0, 1) for _ in range(2)]  # one per thread
        waiting = reader.fetch(wanted.key, 0, 1)
        waiting.cancel()
        calls = calls_of(store, monkeypatch)
        faults.released.set()
        assert all(fetch.wait(PATIENCE_S) for fetch in (*busy, waiting))
        assert (reader.counters.hits, reader.counters.cancelled) == (2, 1)
        assert calls.count("read") <= 2
        assert not reader.is_resting

    def test_close_answers_what_waits(self, store, faults):
        wanted = put(store, 1)
        reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20)
        faults.hang = {"read"}
        fetches = [reader.fetch(wanted.key, 0, 1) for _ in range(5)]
        reader.close()
        assert all(fetch.is_done for fetch in fetches)
        assert reader.fetch(wanted.key, 0, 1).is_done
        assert (reader.counters.cancelled, reader.counters.refused) == (5, 1)
        faults.released.set()

    def test_counts_of_two_threads_add_up(self, reader, store):
        objects = [put(store, number, 20) for number in range(5)]
        fetches = [reader.fetch(objects[number % 5].key, 0, 20) for number in range(300)]
        assert all(fetch.wait(PATIENCE_S) for fetch in fetches)
        assert reader.counters.hits == 300
        assert reader.counters.num_bytes == 300 * 20 * LAYOUT.bytes_per_token

    def test_a_plug_in_that_breaks_the_contract_is_a_counted_miss(self, reader, store, monkeypatch):
        wanted = put(store, 1)
        monkeypatch.setattr(store, "heads", lambda *_: iter(()))
        self.missed(reader, wanted)
        assert reader.counters.failed == 1

    def test_the_expected_time_grows_with_what_is_asked_for(self, reader, store):
        wanted = put(store, 1)
        for _ in range(5):
            self.get(reader, wanted)
        assert 0 <= reader.expected_s(10) <= reader.expected_s(10_000)
        assert reader.expected_s(1_000, num_reads=1) <= reader.expected_s(1_000, num_reads=5)


class TestWriter:
    @pytest.fixture
    def writer(self, store):
        writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=1 << 20)
        yield writer
        writer.close(0.0)

    def offer(self, writer, wanted):
        assert writer.offer(wanted.record, lambda: LAYOUT.unpack(wanted.rows))
        assert writer.flush(PATIENCE_S)
        return [(one.key, one.is_stored) for one in writer.take_written()]

    def test_a_donor_is_written_once(self, writer, memory):
        wanted = make_object(1)
        for _ in range(2):
            assert self.offer(writer, wanted) == [(wanted.key, True)]
        assert (writer.counters.stored, writer.counters.known) == (1, 1)
        assert memory.keys(SPACE) == {wanted.key}
        assert next(memory.heads(SPACE, [wanted.key]))[1] == wanted.head

    def test_a_write_for_which_there_is_no_thread_is_not_taken(self, writer, no_threads):
        wanted = make_object(1)
        with no_threads():
            assert not writer.offer(wanted.record, lambda: LAYOUT.unpack(wanted.rows))
        assert writer.flush(PATIENCE_S)
        assert (writer.queued_bytes, writer.counters.dropped, writer.take_written()) == (0, 1, [])
        assert self.offer(writer, wanted) == [(wanted.key, True)]

    def test_known_donors_are_not_even_read(self, writer, store):
        wanted = put(store, 1)
        assert writer.offer(wanted.record, lambda: pytest.fail("their K/V are not needed"))
        assert writer.flush(PATIENCE_S)
        assert [one.is_stored for one in writer.take_written()] == [True]

    def test_a_damaged_head_is_written_again(self, writer, memory):
        wanted = make_object(1)
        memory.put(SPACE, wanted.key, wanted.head[:-1], wanted.body)
        assert self.offer(writer, wanted) == [(wanted.key, True)]
        assert (writer.counters.stored, writer.counters.known) == (1, 0)
        assert next(memory.heads(SPACE, [wanted.key]))[1] == wanted.head

    @pytest.mark.parametrize(("fault", "counter"), [("full", "refused"), ("fail", "failed")])
    def test_a_store_that_refuses_is_counted(self, writer, faults, fault, counter):
        getattr(faults, fault).add("put")
        wanted = make_object(1)
        assert self.offer(writer, wanted) == [(wanted.key, False)]
        assert getattr(writer.counters, counter) == 1
        assert writer.queued_bytes == 0

    def test_kv_that_cannot_be_read_are_counted(self, writer):
        wanted = make_object(1)
        assert writer.offer(wanted.record, lambda: 1 / 0)
        assert writer.flush(PATIENCE_S)
        assert [one.is_stored for one in writer.take_written()] == [False]
        assert writer.counters.failed == 1

    def test_kv_that_are_gone_by_now_were_never_tried(self, writer, memory):
        wanted = make_object(1)
        assert writer.offer(wanted.record, lambda: None)
        assert writer.flush(PATIENCE_S)
        assert [one.is_stored for one in writer.take_written()] == [False]
        assert (writer.counters.dropped, writer.counters.failed) == (1, 0)
        assert memory.keys(SPACE) == frozenset()

    def test_longer_donors_than_a_reader_believes_in_are_refused(self, writer):
        record = replace(make_object(1).record, token_ids=np.zeros(MOST_TOKENS + 1, np.int32))
        assert writer.offer(record, lambda: pytest.fail("their K/V are not needed"))
        assert writer.flush(PATIENCE_S)
        assert (writer.counters.refused, writer.counters.failed) == (1, 0)

    def test_kv_of_another_layout_are_refused(self, writer):
        wanted = make_object(1)
        block = LAYOUT.unpack(wanted.rows)
        assert writer.offer(wanted.record, lambda: replace(block, keys=block.values, values=block.keys))
        assert writer.flush(PATIENCE_S)
        assert [one.is_stored for one in writer.take_written()] == [False]

    def test_what_does_not_fit_into_the_queue_is_dropped(self, store, faults):
        writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=500 * LAYOUT.bytes_per_token)
        faults.hang = {"put"}
        objects = [make_object(number) for number in range(3)]
        accepted = [writer.offer(one.record, lambda one=one: LAYOUT.unpack(one.rows)) for one in objects]
        assert accepted == [True, False, False]
        assert writer.counters.dropped == 2
        assert not writer.flush(0.01)
        faults.released.set()
        assert writer.flush(PATIENCE_S)
        assert [one.key for one in writer.take_written()] == [objects[0].key]
        writer.close()

    def test_close_writes_what_waits(self, store, memory):
        writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=1 << 20)
        objects = [make_object(number, 20) for number in range(10)]
        for one in objects:
            writer.offer(one.record, lambda one=one: LAYOUT.unpack(one.rows))
        writer.close(PATIENCE_S)
        assert memory.keys(SPACE) == {one.key for one in objects}
        assert not writer.offer(objects[0].record, lambda: None)
        assert writer.counters.dropped == 1

    def test_close_gives_up_a_store_that_hangs(self, store, faults):
        writer = StoreWriter(store, SPACE, LAYOUT, max_queued_bytes=1 << 20)
        faults.hang = {"put"}
        writer.offer(make_object(1).record, lambda: LAYOUT.unpack(make_object(1).rows))
        writer.close(0.05)
        assert writer.take_written() == []
        faults.released.set()


class TestFeed:
    @pytest.fixture
    def feeds(self):
        made = []

        def make(store, spaces=(SPACE,), **options):
            made.append(StoreFeed(store, spaces, interval_s=3_600.0, **options))
            return made[-1]

        yield make
        for feed in made:
            feed.close()

    def seen(self, feed, limit=1_000):
        assert feed.look(PATIENCE_S)
        return self.told(feed, limit)

    def told(self, feed, limit=1_000):
        news = feed.news(limit)
        return {record.key for record in news.added}, set(news.removed)

    def failed(self, feed):
        with pytest.raises(StoreError) as raised:
            feed.look(PATIENCE_S)
        assert len(str(raised.value).splitlines()) == 1
        return self.told(feed)

    def test_tells_what_is_there_once(self, feeds, store):
        first, feed = put(store, 1), feeds(store)
        assert self.seen(feed) == ({first.key}, set())
        assert self.seen(feed) == (set(), set())
        second = put(store, 2)
        assert self.seen(feed) == ({second.key}, set())

    def test_tells_tokens_and_all(self, feeds, store):
        wanted, feed = put(store, 1), feeds(store)
        assert feed.look(PATIENCE_S)
        (record,) = feed.news().added
        assert np.array_equal(record.token_ids, wanted.record.token_ids)
        assert (record.generation, record.start_position) == (wanted.record.generation, wanted.record.start_position)
        assert record.namespace_key == wanted.record.namespace_key

    def test_tells_what_is_gone(self, feeds, store):
        first, second, feed = put(store, 1), put(store, 2), feeds(store)
        self.seen(feed)
        store.remove(SPACE, first.key)
        assert self.seen(feed) == (set(), {first.key})
        put(store, 1)
        assert self.seen(feed) == ({first.key}, set())
        assert second.key in store.keys(SPACE)

    def test_what_went_before_anybody_heard_of_it_is_not_told(self, feeds, store):
        first, second, feed = put(store, 1), put(store, 2), feeds(store)
        assert feed.look(PATIENCE_S)
        store.remove(SPACE, first.key)
        assert self.seen(feed) == ({second.key}, set())
        put(store, 1)
        assert self.seen(feed) == ({first.key}, set())

    def test_a_donor_counts_if_every_rank_has_it(self, feeds, store):
        other = "ab"
        both, one = put(store, 1), put(store, 2)
        elsewhere = make_object(1, 700, space=other)
        store.put(other, elsewhere.key, elsewhere.head, elsewhere.body)
        feed = feeds(store, (SPACE, other))
        assert self.seen(feed) == ({both.key}, set())
        store.remove(other, both.key)
        assert self.seen(feed) == (set(), {both.key})
        assert one.key in store.keys(SPACE)

    @pytest.mark.parametrize("fault", ["corrupt", "truncate"])
    def test_damaged_heads_go(self, feeds, store, memory, faults, fault):
        put(store, 1)
        getattr(faults, fault).add("heads")
        feed = feeds(store)
        assert self.seen(feed) == (set(), set())
        assert feed.num_corrupt == 1
        assert memory.keys(SPACE) == frozenset()

    def test_a_store_that_fails_is_looked_into_again(self, feeds, store, faults):
        wanted = put(store, 1)
        faults.fail = {"keys"}
        feed = feeds(store)
        assert self.failed(feed) == (set(), set())
        assert feed.num_errors >= 1
        for number in (2, 3):  # three heads in a row
            put(store, number)
        faults.fail = {"heads"}
        assert self.failed(feed) == (set(), set())
        faults.fail = set()
        assert self.seen(feed) == ({wanted.key, make_object(2, 700).key, make_object(3, 700).key}, set())

    def test_a_look_that_fails_says_so_at_once_and_the_next_one_what_it_finds(self, feeds, store, faults, monkeypatch):
        """Also where a plug-in raises what it must not."""
        feed = feeds(store)
        assert self.seen(feed) == (set(), set())
        wanted, real = put(store, 1), store.keys
        monkeypatch.setattr(store, "keys", lambda space: 1 / 0)
        with pytest.raises(StoreError, match="ZeroDivisionError"):
            feed.look(PATIENCE_S)
        monkeypatch.setattr(store, "keys", real)
        assert self.seen(feed) == ({wanted.key}, set())

    def test_one_damaged_head_that_cannot_go_hides_no_other(self, feeds, memory):
        keys = sorted(put(memory, number, 20).key for number in range(30))
        head, body = memory.objects[SPACE, keys[0]]
        memory.objects[SPACE, keys[0]] = b"damaged" + head[7:], body
        store = ReadOnlyStore(memory)
        feed = feeds(store)
        assert self.seen(feed) == (set(keys[1:]), set())
        assert self.seen(feed) == (set(), set())
        assert (feed.num_corrupt, feed.num_errors) == (1, 1), "it is counted once"
        memory.objects[SPACE, keys[0]] = head, body
        assert self.seen(feed) == ({keys[0]}, set())

    @pytest.mark.parametrize("error", [StoreError, ValueError, RecursionError, MemoryError])
    @pytest.mark.parametrize("num_bad", [1, 2, 3, 7, 64, 70])
    def test_heads_that_cannot_be_read_hide_no_others(self, feeds, memory, num_bad, error):
        """Three in a row end a look, since the store itself may be what fails, but the next one goes on after them."""
        keys = sorted(put(memory, number, 20).key for number in range(90))
        bad = set(keys[:num_bad])
        store = ReadOnlyStore(memory, bad, error)
        feed, found = feeds(store), set()
        for _ in range(1 + num_bad // 3):
            with contextlib.suppress(StoreError):
                feed.look(PATIENCE_S)
            found |= self.told(feed)[0]
        assert found == set(keys) - bad
        num_errors = feed.num_errors
        assert self.seen(feed) == (set(), set())
        assert feed.num_errors == num_errors, "what is known to be bad is counted once"
        bad.clear()
        assert self.seen(feed) == (set(keys[:num_bad]), set())

    def test_what_was_put_aside_and_is_gone_is_forgotten(self, feeds, memory):
        wanted, bad = put(memory, 1), set()
        store = ReadOnlyStore(memory, bad)
        bad.add(wanted.key)
        feed = feeds(store)
        assert self.seen(feed) == (set(), set())
        memory.remove(SPACE, wanted.key)
        bad.clear()
        assert self.seen(feed) == (set(), set())
        put(memory, 1)
        assert self.seen(feed) == ({wanted.key}, set())

    def test_forgetting_what_still_waits_takes_nobodys_room(self, feeds, store):
        wanted, feed = put(store, 1), feeds(store, max_pending=3)
        for _ in range(8):
            assert feed.look(PATIENCE_S), "the feed waits for room that nobody gives back"
            feed.forget([wanted.key])
        assert self.seen(feed) == ({wanted.key}, set())
        assert self.seen(feed) == (set(), set())

    def test_no_more_wait_than_may(self, feeds, store):
        objects = {put(store, number, 20).key for number in range(30)}
        feed, found = feeds(store, max_pending=7), set()
        assert not feed.look(0.01)
        deadline = time.monotonic() + PATIENCE_S
        while found != objects and time.monotonic() < deadline:
            news = feed.news(3)
            assert len(news.added) <= 3
            found.update(record.key for record in news.added)
        assert found == objects

    def test_what_was_forgotten_is_told_again(self, feeds, store):
        wanted, feed = put(store, 1), feeds(store)
        self.seen(feed)
        feed.forget([wanted.key])
        assert self.seen(feed) == ({wanted.key}, set())

    def test_close_ends_a_feed_that_waits(self, feeds, store):
        for number in range(5):
            put(store, number, 20)
        feed = feeds(store, max_pending=1)
        feed.close()
        feed._thread.join(PATIENCE_S)
        assert not feed._thread.is_alive()


class TestSpeed:
    def test_begins_hopeful(self):
        speed = ReadSpeed()
        assert speed.seconds(1_000_000_000) == pytest.approx(1.0, rel=0.1)

    def test_learns_latency_and_bytes(self):
        speed = ReadSpeed()
        for number in range(200):
            num_bytes = (number % 7 + 1) * 1_000_000
            speed.observe(num_bytes, 0.02 + num_bytes / 5e7)
        assert speed.seconds(0) == pytest.approx(0.02, rel=0.02)
        assert speed.seconds(50_000_000, 3) == pytest.approx(1.06, rel=0.02)

    def test_reads_of_one_size_are_told_right_for_that_size(self):
        speed = ReadSpeed()
        for _ in range(200):
            speed.observe(1_000_000, 0.5)
        assert speed.seconds(1_000_000) == pytest.approx(0.5, rel=0.05)
        assert speed.seconds(2_000_000) >= speed.seconds(1_000_000)

    def test_a_store_that_becomes_slow_is_believed(self):
        speed = ReadSpeed()
        for seconds in (0.001, 1.0):
            for _ in range(60):
                speed.observe(1_000_000, seconds)
        assert speed.seconds(1_000_000) == pytest.approx(1.0, rel=0.05)

    @pytest.mark.parametrize("reads", [[(1 << 20, 1.0)], [(1 << 20, 5.0)] * 2, [(1 << 20, 5.0)] * 60])
    def test_a_store_that_stalled_is_expected_to_be_quick_again(self, reads):
        """An expectation that nothing is read by would never be corrected."""
        now = [100.0]
        speed = ReadSpeed(lambda: now[0])
        for num_bytes, seconds in reads:
            speed.observe(num_bytes, seconds)
        stalled = speed.seconds(1 << 20)
        assert stalled > 0.3
        now[0] += 4
        assert speed.seconds(1 << 20) == stalled, "it is believed for a while"
        now[0] += 26
        assert speed.seconds(1 << 20) < 0.1
        speed.observe(1 << 20, 5.0)
        assert speed.seconds(1 << 20) > 1.0, "one read that is slow again is enough"

    def test_a_store_that_is_read_all_the_time_is_known_as_it_is(self):
        now = [100.0]
        speed = ReadSpeed(lambda: now[0])
        for _ in range(100):
            speed.observe(1 << 20, 0.5)
            now[0] += 2
        assert speed.seconds(1 << 20) == pytest.approx(0.5, rel=0.05)

    @pytest.mark.parametrize("reads", [[(10, 5.0), (1_000, 0.1)] * 50, [(0, 0.0)] * 50, [(1 << 40, 0.0)] * 50])
    def test_is_never_negative(self, reads):
        speed = ReadSpeed()
        for num_bytes, seconds in reads:
            speed.observe(num_bytes, seconds)
            assert speed.seconds(0) >= 0
            assert speed.seconds(1_000_000, 2) >= speed.seconds(0)


class TestThreads:
    def test_tasks_run_in_order_on_one_thread(self):
        threads, done = TaskThreads("test"), []
        finished = threading.Event()
        for number in range(50):
            assert threads.submit(lambda number=number: done.append(number))
        threads.submit(finished.set)
        assert finished.wait(PATIENCE_S)
        assert done == list(range(50))
        assert threads.close(PATIENCE_S)

    def test_a_task_that_raises_ends_no_thread(self, caplog):
        threads, finished = TaskThreads("test"), threading.Event()
        threads.submit(lambda: 1 / 0)
        threads.submit(finished.set)
        assert finished.wait(PATIENCE_S)
        assert "a task of test failed" in caplog.text
        assert threads.close(PATIENCE_S)

    def test_a_machine_without_threads_takes_no_task_until_it_has_some(self, no_threads):
        threads, finished = TaskThreads("test", 2), threading.Event()
        with no_threads():
            assert not threads.submit(finished.set)
        assert threads.submit(lambda: None)
        assert not finished.is_set(), "what was not taken never runs"
        assert threads.submit(finished.set)
        assert finished.wait(PATIENCE_S)
        assert threads.close(PATIENCE_S)

    def test_uses_are_reported_again_once_there_is_a_thread(self, memory, monkeypatch, no_threads):
        touched, done = [], threading.Event()
        monkeypatch.setattr(memory, "touch", lambda space, keys: (touched.append(keys), done.set()))
        touches = Touches(memory)
        with no_threads():
            touches.report([SPACE], ["a"])
        touches.report([SPACE], ["b"])
        assert done.wait(PATIENCE_S)
        assert touched == [["b"]]
        touches.close()

    def test_what_waits_is_dropped_at_the_end(self):
        threads, done, release, begun = TaskThreads("test"), [], threading.Event(), threading.Event()
        threads.submit(lambda: (begun.set(), release.wait(PATIENCE_S)))
        threads.submit(lambda: done.append(1))
        assert begun.wait(PATIENCE_S)
        assert not threads.close()
        assert not threads.submit(lambda: done.append(2))
        release.set()
        assert threads.close(PATIENCE_S) is True
        assert done == []
