"""Text on its way out of a device: copies that come late, memory that is used again too early, and who waits for whom.

The device is a fake whose copies happen when their event is waited for and not before, as those of a busy GPU may: memory
that is written again before that would show in what arrives.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.unit.memory.page_ledger import PageLedger
from tests.unit.memory.test_host_store_contract import assert_same

from kvgraft.errors import CapacityError, StoreError
from kvgraft.integrations.vllm.worker.donor_store import DonorStore
from kvgraft.integrations.vllm.worker.host_reader import HostReader, fill, layout_of, read_block
from kvgraft.integrations.vllm.worker.staged_reader import StagedReader
from kvgraft.memory import HostKVStore
from kvgraft.memory.host_memory import UNIT
from kvgraft.memory.packed import RowShape

HEADS, DIM, NUM_SLOTS, NUM_LAYERS = 2, 4, 64, 3
TOKEN_BYTES = 2 * NUM_LAYERS * HEADS * DIM * 4
PATIENCE_S = 120.0


@dataclass(eq=False)
class Layer:
    """One layer's cache of `NUM_SLOTS` tokens."""

    cache: torch.Tensor = field(default_factory=lambda: torch.randn(2, NUM_SLOTS, HEADS, DIM))

    rows = (RowShape((HEADS, DIM), torch.float32),) * 2

    def read(self, cache, slots):
        return cache[0][slots], cache[1][slots]


class Home:
    """A request's K/V: position p lies in slot p."""

    def __init__(self):
        self.group = SimpleNamespace(layers=tuple(Layer() for _ in range(NUM_LAYERS)))
        self.caches = [layer.cache for layer in self.group.layers]
        self.layers = range(NUM_LAYERS)

    def place(self, positions):
        slots = torch.from_numpy(positions)
        return SimpleNamespace(read=lambda layer: self.group.layers[layer].read(self.caches[layer], slots))

    def overwrite(self):
        """As the engine does with blocks that it gives to somebody else."""
        for cache in self.caches:
            cache.normal_()


class Late:
    """A device whose copies happen when their event is waited for, which takes until `let_go`."""

    def __init__(self, *, held=False):
        self.num_copies, self.num_bytes, self.waiters = 0, 0, []
        self._may_arrive = threading.Event()
        if not held:
            self._may_arrive.set()

    def ring(self, num_bytes):
        return (torch.full((num_bytes,), fill, dtype=torch.uint8) for fill in (0xAA, 0xBB))

    def copy(self, source, target):
        self.num_copies += 1
        self.num_bytes += len(source)
        return Copy(source, target, self)

    def arrives(self):
        self.waiters.append(threading.current_thread())
        assert self._may_arrive.wait(PATIENCE_S)

    def let_go(self):
        self._may_arrive.set()


@dataclass(frozen=True)
class Copy:
    source: torch.Tensor
    target: torch.Tensor
    device: Late

    def synchronize(self):
        self.device.arrives()
        self.target.copy_(self.source)


@pytest.fixture
def home():
    return Home()


def positions(start, stop):
    return np.arange(start, stop)


def reader_of(device, tokens):
    """A reader with a ring of so many tokens."""
    return StagedReader(device, tokens * TOKEN_BYTES)


def store_of(reader, tokens=1_000):
    return DonorStore(HostKVStore(tokens * TOKEN_BYTES), reader)


def test_blocks_may_be_written_again_while_their_text_is_on_its_way(home):
    device = Late(held=True)
    reader = reader_of(device, 64)
    expected = read_block([home], positions(3, 13))
    (part,) = reader.read([home], positions(3, 13))
    home.overwrite()
    assert not part.block.done()
    device.let_go()
    assert_same(part.block.result(PATIENCE_S), expected)
    reader.close()


def test_a_piece_is_one_copy_of_all_layers(home):
    device = Late()
    reader = reader_of(device, 64)
    reader.read([home], positions(0, 16))
    assert (device.num_copies, device.num_bytes) == (1, 16 * TOKEN_BYTES)
    reader.close()


def test_nothing_waits_on_the_engines_thread(home):
    """Neither captures nor what seals, looks at, drops or reports donors; only who reads one."""
    device = Late(held=True)
    donors = store_of(reader_of(device, 64))
    expected = read_block([home], positions(0, 30))
    for text, (start, stop) in enumerate([(0, 10), (10, 20), (20, 30)]):
        donors.capture(text, [home], positions(start, stop))
        donors.seal(text, 10 + text)
    donors.settle()
    assert donors.used_bytes == 30 * TOKEN_BYTES
    assert donors.take_lost() == set()
    read = donors.later(12)
    donors.drop(11)
    donors.check()
    assert threading.current_thread() not in device.waiters
    threading.Timer(0.01, device.let_go).start()
    assert_same(donors.get(10, 2, 5), expected.span(2, 5))
    assert_same(read(), expected.span(20, 10))
    donors.close()
    donors.settle()
    assert donors.used_bytes == 20 * TOKEN_BYTES
    assert donors.later(11) is None
    donors.check()
    assert threading.current_thread() not in device.waiters


def test_the_ring_is_used_again_only_when_text_has_left_it(home):
    """Texts of many lengths through a ring that holds a few of them, with blocks written again after every one."""
    device, rng = Late(), np.random.default_rng(0)
    reader = reader_of(device, 40)
    due = []
    for _ in range(200):
        start, stop = np.sort(rng.choice(NUM_SLOTS + 1, 2, replace=False))
        due.append((read_block([home], positions(start, stop)), reader.read([home], positions(start, stop))))
        home.overwrite()
    for expected, parts in due:
        first = 0
        for part in parts:
            block = part.block.result(PATIENCE_S)
            assert_same(block, expected.span(first, block.num_tokens))
            first += block.num_tokens
        assert first == expected.num_tokens
    reader.close()


def test_a_full_ring_is_waited_for(home):
    device = Late(held=True)
    reader = reader_of(device, 16)
    for start in (0, 4, 8):
        reader.read([home], positions(start, start + 4))
    assert reader.num_waits == 0
    threading.Timer(0.05, device.let_go).start()
    expected = read_block([home], positions(12, 28))
    parts = reader.read([home], positions(12, 28))
    assert reader.num_waits > 0
    assert [part.num_bytes for part in parts] == [4 * TOKEN_BYTES] * 4
    for number, part in enumerate(parts):
        assert_same(part.block.result(PATIENCE_S), expected.span(4 * number, 4))
    reader.close()


def test_a_text_in_many_pieces_becomes_one_donor(home):
    donors = store_of(reader_of(Late(), 16))
    expected = read_block([home], positions(0, 50))
    donors.capture(7, [home], positions(0, 20))
    donors.capture(7, [home], positions(20, 50))
    donors.seal(7, 1)
    home.overwrite()
    assert_same(donors.get(1, 0, 50), expected)
    donors.check()
    donors.close()


def test_a_copy_that_fails_is_told_and_costs_its_donor_alone(home):
    class Broken(Late):
        def copy(self, source, target):
            super().copy(source, target)
            if self.num_copies == 2:
                return SimpleNamespace(synchronize=self._fail)
            return Copy(source, target, self)

        def _fail(self):
            raise RuntimeError("the device is gone")

    reader = reader_of(Broken(), 64)
    donors = store_of(reader)
    for text in range(3):
        donors.capture(text, [home], positions(0, 10))
    for text in range(3):
        with suppress(StoreError):  # where the copy has failed by then
            donors.seal(text, text)
    reader.close()
    donors.settle()
    assert donors.later(1) is None
    assert donors.get(0, 0, 10).num_tokens == donors.get(2, 0, 10).num_tokens == 10
    assert donors.used_bytes == 20 * TOKEN_BYTES
    donors.check()


def test_text_on_its_way_counts_against_the_budget(home):
    device = Late(held=True)
    donors = store_of(reader_of(device, 64), tokens=25)
    for text in range(3):
        donors.capture(text, [home], positions(0, 10))
    donors.seal(0, 0)
    donors.seal(1, 1)
    with pytest.raises(CapacityError):
        donors.seal(2, 2)
    assert donors.take_lost() == set()
    donors.clear()
    assert donors.used_bytes == 0
    device.let_go()
    donors.close()
    donors.settle()
    donors.check()


def test_a_token_that_is_larger_than_the_ring_is_refused(home):
    reader = StagedReader(Late(), TOKEN_BYTES - 1)
    with pytest.raises(MemoryError, match="does not fit"):
        reader.read([home], positions(0, 2))
    reader.close()


def test_without_a_device_text_is_at_hand_at_once_in_one_piece_of_memory(home):
    reader = HostReader()
    (part,) = reader.read([home], positions(5, 12))
    block = part.block.result(0)
    staged = layout_of([home]).empty(7)
    fill(staged, [home], positions(5, 12))
    assert_same(block, staged)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*block.keys, *block.values)}) == 1
    assert part.num_bytes == 7 * TOKEN_BYTES


def test_texts_and_donors_share_one_page_locked_budget(home):
    """Of texts in parts, whole ones and donors together."""
    pages, tokens = PageLedger(), 40 * (UNIT // TOKEN_BYTES)
    store = HostKVStore(tokens * TOKEN_BYTES, pages=pages)
    donors = DonorStore(store, StagedReader(Late(), 64 * TOKEN_BYTES, store.memory))
    number = 0
    for count in (5, 17, 33, 60):
        kept = range(number, number := number + 20)
        for donor_id in kept:
            for start in range(0, count, 16):
                donors.capture(donor_id, [home], positions(start, min(start + 16, count)))
            donors.seal(donor_id, donor_id)
        expected = read_block([home], positions(0, count))
        assert_same(donors.get(kept[-1], 0, count), expected)
        assert all(map(store.memory.holds, donors.get(kept[-1], 0, count).keys))
        for donor_id in kept:
            donors.drop(donor_id)
    donors.close()
    assert pages.most < store.budget_bytes + UNIT


def test_a_text_in_one_piece_is_moved_once(home):
    store = HostKVStore(4 * UNIT, pages=PageLedger())
    reader = StagedReader(Late(), 64 * TOKEN_BYTES, store.memory)
    donors = DonorStore(store, reader)
    (part,) = reader.read([home], positions(0, 5))
    donors.append(1, part.block.result(PATIENCE_S))
    donors.seal(1, 1)
    assert donors.get(1, 0, 5).keys[0].data_ptr() == part.block.result().keys[0].data_ptr()
    donors.close()
