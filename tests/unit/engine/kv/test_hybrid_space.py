"""A space of two pools: which windows stay where room is needed, and how much a lock of a prefix holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.engine.kv.kv_space import KVSpace
from kvgraft.engine.kv.layer_rows import WindowRow
from kvgraft.engine.kv.sliding_windows import SlidingWindows, window_of
from kvgraft.memory import HybridSlotPool, LayerShape, Owner
from kvgraft.prefix import RadixKey, SWARadixCache
from kvgraft.windows import SlidingWindow

WINDOW = 8


@pytest.fixture
def space(page_size):
    """Room for four windows."""
    pool = HybridSlotPool(
        [LayerShape(1, 2), LayerShape(1, 2)],
        [None, SlidingWindow(WINDOW)],
        num_slots=100,
        num_window_slots=4 * WINDOW,
        dtype=torch.float32,
    )
    prefix = SWARadixCache(page_size, sliding_window_size=WINDOW)
    space = KVSpace(pool, prefix, host_bytes=0, donor_tokens=1_000, min_run=16)
    SlidingWindows(space, pool)
    return space


def store(space, key, *ends):
    """Store a prompt as a request does after each of its pieces."""
    slots, windows = space.allocate(len(key)), space.layers.allocate(len(key))
    row = WindowRow(windows, 0, 0, len(key), len(key), is_donor=False)
    for end in ends:
        space.store_prefix(RadixKey(key.token_ids, limit=end), slots[:end], row)
    space.allocator.release(slots, Owner.REQUEST)
    space.layers.allocator.release(windows, Owner.REQUEST)
    space.check()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("ends", [(24,), (8, 16, 24), (12, 24)])
def test_windows_that_a_prompt_reads_no_more_leave_before_those_of_another(space, ends):
    long, short = RadixKey(np.arange(24)), RadixKey(np.arange(100, 108))
    store(space, long, *ends)
    store(space, short, 8)
    for key in (long, short, long):
        space.match(key)
    space.layers.allocator.release(space.layers.allocate(2 * WINDOW), Owner.REQUEST)
    space.check()
    assert [space.match(key).prefix_len for key in (short, long)] == [8, 24]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_lock_of_a_long_prompt_holds_less_than_two_windows(space):
    key = RadixKey(np.arange(30))
    store(space, key, 30)
    match = space.match(key)
    assert match.prefix_len - window_of(space.lock(match.handle)) in range(WINDOW, WINDOW + space.prefix.page_size)
