"""Page-locked memory: within its limit whatever comes and goes, and used again only after the device has read it."""

from __future__ import annotations

import gc
import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.memory.page_ledger import PageLedger

from kvgraft.memory.host_memory import UNIT, page_locked_memory
from kvgraft.memory.page_lock import CudaPages


@pytest.fixture
def pages():
    return PageLedger()


def test_pieces_of_any_size_take_no_more_than_the_limit(pages):
    """PyTorch's page-locked pieces of these sizes take 6.8 times as much: rounded up, and kept for their own size."""
    limit, rng = 200 * UNIT, np.random.default_rng(0)
    memory = page_locked_memory(limit, pages)
    for size in (3, 5, 9, 17, 33, 65):
        kept = [memory.take(size * UNIT - int(rng.integers(UNIT))) for _ in range(200 // size)]
        assert all(memory.holds(piece) for piece in kept)
        del kept
    assert pages.most == limit


def test_small_pieces_are_locked_too(pages):
    memory = page_locked_memory(10 * UNIT, pages)
    kept = [memory.take(num_bytes) for num_bytes in (0, 1, UNIT)]
    assert [len(piece) for piece in kept] == [0, 1, UNIT]
    assert all(memory.holds(piece) for piece in kept[1:])


def test_a_piece_without_room_is_not_locked(pages):
    memory = page_locked_memory(4 * UNIT, pages)
    first = memory.take(3 * UNIT)
    over = memory.take(2 * UNIT)
    assert (memory.holds(first), memory.holds(over), memory.holds(over[5:])) == (True, False, False)
    del first
    assert memory.holds(memory.take(4 * UNIT))
    assert pages.most == 4 * UNIT


def test_a_limit_is_made_of_slabs_that_are_locked_as_they_are_needed(pages):
    memory = page_locked_memory(1 << 40, pages)
    assert (memory.slab_bytes, pages.total) == (1 << 37, 0)
    memory = page_locked_memory(10 * UNIT, pages)
    memory.slab_bytes = 4 * UNIT
    kept = [memory.take(3 * UNIT) for _ in range(2)]
    assert [memory.num_slabs, pages.total, memory.held_bytes] == [2, 8 * UNIT, 8 * UNIT]
    kept.append(memory.take(UNIT + 1))
    assert (memory.holds(kept[2]), pages.total) == (True, 10 * UNIT), "the last slab is what is left of the limit"


def test_what_came_back_is_used_again_after_the_device_has_settled(pages):
    memory = page_locked_memory(2 * UNIT, pages)
    first, second = memory.take(UNIT), memory.take(UNIT)
    assert pages.num_waits == 0, "nothing came back"
    place = first.data_ptr()
    del first
    assert memory.take(UNIT).data_ptr() == place
    assert pages.num_waits == 1
    assert memory.holds(second)


def test_pages_are_unlocked_when_the_last_piece_has_gone(pages):
    memory = page_locked_memory(2 * UNIT, pages)
    piece = memory.take(UNIT)
    del memory
    gc.collect()
    assert pages.total == 2 * UNIT
    del piece
    gc.collect()
    assert pages.total == 0


def test_where_pages_cannot_be_locked_memory_is_as_it_comes(pages, caplog):
    pages.is_refused = True
    memory = page_locked_memory(2 * UNIT, pages)
    with caplog.at_level(logging.WARNING, "kvgraft"):
        pieces = [memory.take(UNIT) for _ in range(3)]
    assert not any(map(memory.holds, pieces))
    assert [record.message for record in caplog.records] == [
        "K/V are kept in memory that is not page-locked: no more pages can be locked"
    ]


def test_cuda_is_asked_for_these_pages(monkeypatch):
    asked = []
    runtime = SimpleNamespace(
        cudaHostRegister=lambda *given: asked.append(("lock", *given)) or given[1] // (1 << 20),
        cudaHostUnregister=lambda *given: asked.append(("unlock", *given)),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: device)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: asked.append(("settle", device)))
    pages = CudaPages()
    pages.lock(4096, 100)
    with pytest.raises(MemoryError, match=r"does not lock 2097152 bytes of host memory \(error 2\)"):
        pages.lock(4096, 2 << 20)
    pages.unlock(4096)
    pages.settle()
    assert asked == [("lock", 4096, 100, 0), ("lock", 4096, 2 << 20, 0), ("unlock", 4096), ("settle", 1)]
