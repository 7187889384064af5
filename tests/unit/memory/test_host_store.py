"""KVBlock by example, and HostKVStore beyond what every store does (tests/conformance/test_stores.py)."""

from __future__ import annotations

import pytest
import torch
from tests.unit.memory.page_ledger import PageLedger

from kvgraft.errors import ConfigError, CorruptCacheError, StoreError
from kvgraft.memory import HostKVStore, KVBlock
from kvgraft.memory.host_memory import UNIT
from kvgraft.memory.page_lock import CudaPages


def make_block(num_tokens=4, num_layers=2):
    def tensors(offset):
        shape = (num_tokens, 2, 3)
        size = num_tokens * 6
        return tuple(torch.arange(size).float().reshape(shape) + offset + layer for layer in range(num_layers))

    return KVBlock(tensors(0), tensors(0.5))


def test_block_knows_its_size():
    block = make_block(5)
    assert (block.num_tokens, block.num_layers, block.num_bytes) == (5, 2, 5 * 6 * 4 * 4)


def test_block_refuses_tensors_that_do_not_belong_together():
    good = torch.zeros(4, 2, 3)
    for keys, values in (
        ((), ()),
        ((good,), ()),
        ((good,), (good[:3],)),
        ((good, good[:3]), (good, good)),
        ((good[0],), (good[0],)),
    ):
        with pytest.raises(ConfigError):
            KVBlock(keys, values)


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 5), (4, 1), (1, -1)])
def test_span_outside_a_block_is_refused(start, length):
    with pytest.raises(ConfigError):
        make_block().span(start, length)


def test_get_gives_views_of_what_was_put():
    store = HostKVStore(10_000)
    block = make_block()
    store.put(1, block)
    span = store.get(1, 1, 2)
    assert torch.equal(span.keys[1], block.keys[1][1:3])
    assert span.keys[0].untyped_storage().data_ptr() == block.keys[0].untyped_storage().data_ptr()
    assert store.get(1).num_tokens == 4
    assert store.get(1, 3).num_tokens == 1


def test_views_are_copied_so_that_used_bytes_is_true():
    store = HostKVStore(10_000)
    long = make_block(1_000)
    store.put(1, long.span(10, 2))
    transposed = make_block().keys[0].transpose(1, 2)
    store.put(2, KVBlock((transposed,), (transposed,)))
    assert store.used_bytes == 2 * 6 * 4 * 4 + 2 * 4 * 6 * 4
    assert torch.equal(store.get(1).values[1], long.values[1][10:12])
    assert torch.equal(store.get(2).keys[0], transposed)
    store.check()


def test_nothing_is_replaced_or_invented():
    store = HostKVStore(10_000)
    store.put(1, make_block())
    with pytest.raises(StoreError, match="already"):
        store.put(1, make_block())
    for missing in (store.get, store.remove):
        with pytest.raises(StoreError, match="no block under 2"):
            missing(2)


def test_tensors_outside_host_memory_are_refused():
    tensor = torch.empty(1, 1, 1, device="meta")
    with pytest.raises(ConfigError, match="CPU"):
        HostKVStore(10).put(1, KVBlock((tensor,), (tensor,)))


def test_negative_budget_is_refused():
    with pytest.raises(ConfigError):
        HostKVStore(-1)


def test_what_should_be_page_locked_is_copied_there_once():
    pages = PageLedger()
    store = HostKVStore(10 * UNIT, pages=pages)
    store.put(1, make_block())
    assert pages.total == 10 * UNIT
    kept = store.get(1)
    assert store.is_own(kept)
    store.remove(1)
    store.put(2, kept)
    assert store.get(2).keys[0].data_ptr() == kept.keys[0].data_ptr()
    store.check()


def test_what_has_no_room_among_locked_pages_stays_where_it_is():
    store = HostKVStore(UNIT, pages=PageLedger())
    store.put(1, make_block())
    over = make_block()
    assert store.is_own(over)
    store.put(2, over)
    assert store.get(2).keys[0].data_ptr() == over.keys[0].data_ptr(), "a copy would lie in such memory, too"
    store.check()
    store.remove(1)
    assert not store.is_own(over), "there is room for it now"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_blocks_are_page_locked_as_cuda_sees_it():
    store = HostKVStore(10_000, pages=CudaPages())
    store.put(1, make_block())
    assert store.get(1).keys[0].is_pinned()
    store.check()


def test_check_finds_damage():
    store = HostKVStore(10_000)
    store.put(1, make_block())
    store._used_bytes += 1
    with pytest.raises(CorruptCacheError):
        store.check()
    store._used_bytes -= 1
    store._blocks[1] = KVBlock(*(tuple(t[:] for t in side) for side in (make_block().keys, make_block().values)))
    store.check()
    longer = make_block(8)
    store._blocks[1] = longer.span(0, 4)
    with pytest.raises(CorruptCacheError):
        store.check()
