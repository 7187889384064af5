"""Host memory that is used again: never while anything views it."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch

from kvgraft.memory.host_memory import LEAST_BYTES, UNIT, HostMemory

PIECE = LEAST_BYTES
PATIENCE_S = 120.0


def places(memory, count, size=PIECE):
    return [memory.take(size).data_ptr() for _ in range(count)]


def make(slab_pieces=4, *, touches=False):
    return HostMemory(slab_pieces * PIECE, touches)


def test_memory_that_came_back_is_used_again():
    memory = make()
    first = memory.take(PIECE)
    place = first.data_ptr()
    del first
    assert places(memory, 10) == [place] * 10
    assert memory.num_slabs == 1


def test_a_piece_has_exactly_its_bytes():
    piece = make().take(PIECE + 5)
    assert piece.untyped_storage().nbytes() == len(piece) == PIECE + 5


@pytest.mark.parametrize(
    "view", [lambda t: t[5:9], lambda t: t.view(torch.float32)[1:2], lambda t: t.numpy(), torch.Tensor.detach]
)
def test_memory_with_a_view_left_is_not_used_again(view):
    memory = make()
    piece = memory.take(PIECE)
    piece.fill_(7)
    place, kept = piece.data_ptr(), view(piece)
    before = kept.copy() if isinstance(kept, np.ndarray) else kept.clone()
    del piece
    others = [memory.take(PIECE).fill_(1) for _ in range(6)]
    assert place not in {other.data_ptr() for other in others}
    assert np.array_equal(np.asarray(kept), np.asarray(before))
    del kept
    gc.collect()
    assert memory.take(PIECE).data_ptr() == place


def test_pieces_of_any_length_keep_what_was_written_to_them():
    memory, rng = make(touches=True), np.random.default_rng(0)
    kept = {}
    for number in range(300):
        size = int(rng.integers(LEAST_BYTES // 2, 3 * PIECE))
        kept[number] = memory.take(size).fill_(number % 251)
        if len(kept) > 5:
            gone = int(rng.choice(list(kept)))
            assert bool((kept[gone] == gone % 251).all())
            del kept[gone]
    assert all(bool((piece == number % 251).all()) for number, piece in kept.items())


def test_slabs_that_nothing_uses_go_back_to_the_system_but_for_one():
    memory = make()
    kept = [memory.take(3 * PIECE) for _ in range(5)]
    assert memory.num_slabs == 5
    del kept
    memory.take(PIECE)
    assert memory.num_slabs == 1


def test_a_piece_longer_than_a_slab_has_one_of_its_own():
    memory = make()
    assert len(memory.take(9 * PIECE)) == 9 * PIECE
    assert memory.num_slabs == 1


def test_small_pieces_are_the_systems():
    memory = make()
    memory.take(LEAST_BYTES - 1)
    assert memory.num_slabs == 0


def wait_for(condition):
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("the thread touches nothing")


def test_what_each_next_piece_needs_is_touched_and_then_used():
    memory = make(touches=True)
    first = memory.take(PIECE)
    kept = [first]
    for number in (1, 2, 3):
        wait_for(lambda due=number: memory.num_touched == due * PIECE // UNIT and memory._returned)
        kept.append(memory.take(PIECE))
        assert kept[-1].data_ptr() == first.data_ptr() + number * PIECE
    del kept[1]
    memory.take(PIECE)
    assert memory.num_touched == 3 * PIECE // UNIT, "memory that was used before needs no touching"


def test_threads_take_no_memory_twice():
    memory, failures = make(touches=True), []

    def work(number):
        for _ in range(50):
            piece = memory.take(PIECE).fill_(number)
            if not bool((piece == number).all()):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_is_given_where_no_thread_can_be_started(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    memory = make(touches=True)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        first = memory.take(PIECE).fill_(1)
    second = memory.take(PIECE)
    assert second.data_ptr() == first.data_ptr() + PIECE, "nothing was taken for a thread that is not there"
    wait_for(lambda: memory.num_touched == PIECE // UNIT)
