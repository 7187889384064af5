"""Memory of reads is used again, and never while somebody can still see it."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import numpy as np
import torch

from kvgraft.memory.store.layout import Field, RowLayout
from kvgraft.memory.store.tier import StoreReader
from kvgraft.memory.store.tier.buffers import ReadBuffers
from kvgraft.testing.memory_store import MemoryStore
from kvgraft.testing.stored_objects import SPACE, make_object

MIB = 1 << 20
LAYOUT = RowLayout((Field(4, 32, torch.float32),) * 12)
PATIENCE_S = 60.0


def address(rows):
    return rows.__array_interface__["data"][0]


def test_memory_comes_back_when_the_last_view_has_gone():
    buffers = ReadBuffers(8 * MIB)
    rows = buffers.rows(200, 6144)
    assert (rows.shape, rows.dtype, buffers.idle_bytes) == ((200, 6144), np.uint8, 0)
    where, view = address(rows), torch.from_numpy(rows[3:7, 8:16]).view(torch.float32)[1:]
    del rows
    assert buffers.idle_bytes == 0
    other = buffers.rows(200, 6144)
    assert address(other) != where
    del view
    assert buffers.idle_bytes >= 200 * 6144
    again = buffers.rows(190, 6144)
    assert (address(again), again.shape, buffers.idle_bytes) == (where, (190, 6144), 0)


def test_what_is_kept_is_bounded():
    buffers = ReadBuffers(3 * MIB)
    held = [buffers.rows(MIB // 1024, 1024) for _ in range(5)]
    assert len({address(rows) for rows in held}) == 5
    held.clear()
    assert buffers.idle_bytes == 3 * MIB
    buffers.rows(64 * MIB // 1024, 1024)
    assert buffers.idle_bytes == 3 * MIB, "one that is too large is given back at once"


def test_what_comes_back_is_bounded_when_it_comes_back(monkeypatch):
    """Not when somebody asks next: until then it could be everything that was ever in use at once."""
    made, empty = [], np.empty

    class Kept(np.ndarray):
        pass

    def counted(shape, dtype):
        buffer = empty(shape, dtype).view(Kept)
        made.append(weakref.ref(buffer))
        return buffer

    monkeypatch.setattr(np, "empty", counted)
    buffers = ReadBuffers(3 * MIB)
    held = [buffers.rows(MIB // 1024, 1024) for _ in range(20)]
    held.clear()
    gc.collect()
    assert sum(buffer() is not None for buffer in made) == 3, "of 20"


def test_rows_that_go_while_the_buffers_are_in_use_wait_for_nobody():
    buffers = ReadBuffers(3 * MIB)
    rows = buffers.rows(MIB // 1024, 1024)
    with buffers._lock:  # a collection of garbage in the middle of a method, in the same thread
        del rows
    assert buffers.idle_bytes == 0


def test_rows_outlive_what_handed_them_out():
    buffers = ReadBuffers(3 * MIB)
    rows, gone = buffers.rows(MIB // 1024, 1024), weakref.ref(buffers)
    rows[:] = 7
    del buffers
    assert gone() is None
    assert (rows == 7).all()
    del rows


def test_a_long_buffer_is_not_given_for_a_short_read():
    buffers = ReadBuffers(64 * MIB)
    where = address(buffers.rows(16 * 1024, 1024))
    short = buffers.rows(1024, 1024)
    assert address(short) != where
    assert address(buffers.rows(15 * 1024, 1024)) == where


def test_threads_never_share_a_buffer():
    buffers, wrong = ReadBuffers(8 * MIB), []

    def work(number):
        dice = random.Random(number)
        for _ in range(300):
            rows = buffers.rows(dice.randrange(100, 400), 1024)
            rows[:] = number
            view = rows[5:50]
            del rows
            if (view != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert buffers.idle_bytes <= 8 * MIB


def test_kv_that_was_read_stays_as_it_is_while_others_are_read():
    store = MemoryStore()
    reader = StoreReader(store, SPACE, LAYOUT, max_pending_bytes=1 << 30)
    objects = [make_object(number, 600, layout=LAYOUT) for number in range(3)]
    for wanted in objects:
        store.put(SPACE, wanted.key, wanted.head, wanted.body)
    dice, held = random.Random(0), []
    for turn in range(40):
        wanted, start = dice.choice(objects), dice.randrange(300)
        fetch = reader.fetch(wanted.key, start, 250)
        assert fetch.wait(PATIENCE_S)
        held.append((fetch.block(), wanted, start))
        del fetch
        if turn % 3:
            held.pop(dice.randrange(len(held)))
        for block, source, first in held:
            assert np.array_equal(LAYOUT.pack(block), source.rows[first : first + 250])
    assert len({address(block.keys[0].numpy()) for block, _, _ in held}) == len(held) > 5
    reader.close()
