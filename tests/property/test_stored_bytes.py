"""Bytes of stored donors under any damage, and stores under any order of operations: never wrong K/V, every miss counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from kvgraft.errors import CapacityError, StoreError, StoreMissError
from kvgraft.memory.store.file import FileStore
from kvgraft.memory.store.record import decode_head, head_size, object_size
from kvgraft.memory.store.tier import StoreReader, StoreWriter
from kvgraft.testing.memory_store import MemoryStore
from kvgraft.testing.stored_objects import LAYOUT, SPACE, make_object

PATIENCE_S = 60.0
WANTED = make_object(7, 600)
WHOLE = WANTED.head + WANTED.rows.tobytes()
OBJECTS = [make_object(number, 20 + 60 * number) for number in range(8)]
NUMBERS = st.integers(0, len(OBJECTS) - 1)
BY_KEY = {wanted.key: wanted for wanted in OBJECTS}


def fetched(reader, start, length):
    fetch = reader.fetch(WANTED.key, start, length)
    assert fetch.wait(PATIENCE_S)
    return LAYOUT.pack(fetch.block())


def decoded_or_refused(raw):
    """A head, or None if it is refused, which takes one line."""
    try:
        return decode_head(raw, SPACE, WANTED.key)
    except StoreError as refused:
        lines = str(refused).splitlines()
    assert len(lines) == 1
    return None


@given(st.integers(0, len(WHOLE) - 1), st.integers(0, 7), st.integers(0, 599), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_is_never_served(place, bit, start, is_known):
    """Wherever it is, before and behind the first read of the head: what is served is right, or there is a counted miss."""
    damaged = bytearray(WHOLE)
    damaged[place] ^= 1 << bit
    store = MemoryStore()
    reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 20)
    try:
        if is_known:
            store.put(SPACE, WANTED.key, WANTED.head, WANTED.body)
            fetched(reader, 0, 1)
            store.remove(SPACE, WANTED.key)
        before = reader.counters.hits
        head, body = bytes(damaged[: len(WANTED.head)]), memoryview(damaged)[len(WANTED.head) :]
        store.put(SPACE, WANTED.key, head, body)
        length = 600 - start
        try:
            rows = fetched(reader, start, length)
        except StoreError:
            assert (reader.counters.hits, reader.counters.corrupt) == (before, 1)
            assert store.keys(SPACE) == frozenset()
        else:
            assert np.array_equal(rows, WANTED.rows[start:])
            first = start // 256 * 256 * LAYOUT.bytes_per_token + len(WANTED.head)
            assert place < first, "what was served had a damaged byte"
    finally:
        reader.close()


@given(st.integers(0, len(WANTED.head) - 1), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_head_is_refused_or_says_the_same(place, change):
    """Of the donor: a checksum or the layout may differ, which the pages or the reader tell."""
    damaged = bytearray(WANTED.head)
    damaged[place] ^= change
    head = decoded_or_refused(bytes(damaged))
    if head is None:
        return
    assert head.record.key == WANTED.key
    assert np.array_equal(head.record.token_ids, WANTED.record.token_ids)
    assert head.record.namespace_key == WANTED.record.namespace_key
    original = decode_head(WANTED.head, SPACE, WANTED.key)
    assert head.layout != original.layout or not np.array_equal(head.checksums, original.checksums)


@given(st.binary(max_size=400) | st.integers(0, len(WANTED.head)).map(lambda end: WANTED.head[:end]))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_head_are_refused_in_one_line(raw):
    assert decoded_or_refused(raw) is None or raw == WANTED.head
    for told in (head_size, object_size):
        try:
            assert isinstance(told(raw), int)
        except StoreError as refused:
            lines = str(refused).splitlines()
        else:
            lines = [""]
        assert len(lines) == 1


@given(damage=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_is_never_served(damage, tmp_path_factory):
    """Truncated, grown, flipped or replaced by anything."""
    store = FileStore(tmp_path_factory.mktemp("files"))
    store.put(SPACE, WANTED.key, WANTED.head, WANTED.body)
    raw = bytearray(WHOLE)
    kind = damage.draw(st.sampled_from(("cut", "grown", "flipped", "foreign")))
    if kind == "cut":
        del raw[damage.draw(st.integers(0, len(raw) - 1)) :]
    elif kind == "grown":
        raw += damage.draw(st.binary(min_size=1, max_size=100))
    elif kind == "flipped":
        raw[damage.draw(st.integers(0, len(raw) - 1))] ^= damage.draw(st.integers(1, 255))
    else:
        raw = bytearray(damage.draw(st.binary(max_size=3_000)))
    store.path(SPACE, WANTED.key).write_bytes(raw)
    reader = StoreReader(FileStore(store.root), SPACE, LAYOUT, max_pending_bytes=1 << 20)
    try:
        with pytest.raises(StoreError):
            fetched(reader, 0, 600)
        counters = reader.counters
        assert (counters.hits, counters.corrupt + counters.missing) == (0, 1)
    finally:
        reader.close()
    assert store.keys(SPACE) == frozenset()


class StoreMachine(RuleBasedStateMachine):
    """The tier over a store, against a dictionary of what it has acknowledged."""

    limit = 1 << 30

    @initialize()
    def begin(self):
        self.store = self.make_store()
        self.writer = StoreWriter(self.store, SPACE, LAYOUT, max_queued_bytes=1 << 24)
        self.reader = StoreReader(self.store, SPACE, LAYOUT, max_pending_bytes=1 << 24)
        self.kept = set()

    @rule(number=NUMBERS)
    def write(self, number):
        wanted = OBJECTS[number]
        self.writer.offer(wanted.record, lambda: LAYOUT.unpack(wanted.rows))
        assert self.writer.flush(PATIENCE_S)
        (written,) = self.writer.take_written()
        assert written.is_stored is (wanted.num_bytes <= self.limit)
        if written.is_stored:
            self.kept.add(wanted.key)
        self.note_evictions(wanted.key)

    @rule(number=NUMBERS)
    def put(self, number):
        wanted = OBJECTS[number]
        try:
            is_new = self.store.put(SPACE, wanted.key, wanted.head, wanted.body)
        except CapacityError:
            assert wanted.num_bytes > self.limit
            return
        assert is_new is (wanted.key not in self.kept)
        self.kept.add(wanted.key)
        self.note_evictions(wanted.key)

    def note_evictions(self, newest):
        present = self.store.keys(SPACE)
        if sum(wanted.num_bytes for wanted in OBJECTS) < self.limit:
            assert present == self.kept
        assert newest in present or newest not in self.kept
        self.kept &= present

    @rule(number=NUMBERS, data=st.data())
    def read(self, number, data):
        wanted = OBJECTS[number]
        start = data.draw(st.integers(0, wanted.record.num_tokens - 1))
        length = data.draw(st.integers(1, wanted.record.num_tokens - start))
        fetch = self.reader.fetch(wanted.key, start, length)
        assert fetch.wait(PATIENCE_S)
        if wanted.key in self.kept:
            assert np.array_equal(LAYOUT.pack(fetch.block()), wanted.rows[start : start + length])
        else:
            with pytest.raises(StoreMissError):
                fetch.block()

    @rule(number=NUMBERS)
    def remove(self, number):
        wanted = OBJECTS[number]
        self.store.remove(SPACE, wanted.key)
        self.kept.discard(wanted.key)

    @rule(numbers=st.sets(NUMBERS))
    def touch(self, numbers):
        self.store.touch(SPACE, [OBJECTS[number].key for number in numbers])

    @rule()
    def open_again(self):
        self.store = self.reopened()
        self.reader.close()
        self.reader = StoreReader(self.store, SPACE, LAYOUT, max_pending_bytes=1 << 24)
        self.writer.close(PATIENCE_S)
        self.writer = StoreWriter(self.store, SPACE, LAYOUT, max_queued_bytes=1 << 24)

    @invariant()
    def has_what_it_acknowledged(self):
        if not hasattr(self, "store"):
            return
        assert self.store.keys(SPACE) == self.kept
        heads = dict(self.store.heads(SPACE, list(BY_KEY)))
        assert heads == {key: wanted.head if key in self.kept else None for key, wanted in BY_KEY.items()}
        assert self.store.used_bytes <= self.limit

    def reopened(self):
        return self.store

    def teardown(self):
        if hasattr(self, "store"):
            self.reader.close()
            self.writer.close(PATIENCE_S)
            self.store.close()


class MemoryMachine(StoreMachine):
    def make_store(self):
        return MemoryStore()


class FullMemoryMachine(StoreMachine):
    limit = 60_000

    def make_store(self):
        return MemoryStore(self.limit)


TestMemoryStore = MemoryMachine.TestCase
TestFullMemoryStore = FullMemoryMachine.TestCase


@pytest.mark.parametrize("limit", [1 << 30, 100_000])
def test_files_in_any_order(limit, tmp_path_factory):
    class FileMachine(StoreMachine):
        def make_store(self):
            return FileStore(tmp_path_factory.mktemp("files"), max_bytes=limit)

        def reopened(self):
            return FileStore(self.store.root, max_bytes=limit)

    FileMachine.limit = limit
    run_state_machine_as_test(FileMachine, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))


TestMemoryStore.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestFullMemoryStore.settings = TestMemoryStore.settings
