"""SlotAllocator by example: where slots come from, who holds them, what is refused."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from tests.support.failing_calls import FailingCalls

from kvgraft.errors import CapacityError, ConfigError, CorruptCacheError
from kvgraft.memory import Owner, SlotAllocator, SlotUsage


def make_allocator(num_slots=16, *, free=None):
    """An allocator in which exactly `free` are free."""
    allocator = SlotAllocator(num_slots)
    if free is not None:
        allocator.release(np.setdiff1d(allocator.allocate(num_slots), np.setdiff1d(np.arange(num_slots), free)), 0)
    return allocator


def test_fresh_allocator_gives_ascending_slots():
    allocator = SlotAllocator(8)
    slots = allocator.allocate(3)
    assert slots.tolist() == [0, 1, 2]
    assert slots.dtype == np.int64
    assert (allocator.free_size, allocator.num_slots, allocator.num_free_runs) == (5, 8, 1)


def test_allocation_of_nothing_is_empty():
    allocator = SlotAllocator(8)
    assert allocator.allocate(0).tolist() == []
    assert allocator.release(np.empty(0, dtype=np.int64), Owner.REQUEST).tolist() == []
    allocator.retain(np.array([]), Owner.CACHE)
    allocator.check()


def test_tightest_run_is_preferred():
    allocator = make_allocator(free=[0, 1, 2, 3, 6, 7, 10, 11, 12])
    assert allocator.allocate(2).tolist() == [6, 7]
    assert allocator.allocate(3).tolist() == [10, 11, 12]
    assert allocator.allocate(1).tolist() == [0]


def test_growing_sequence_stays_in_one_run():
    allocator = SlotAllocator(16)
    slots = allocator.allocate(4)
    for expected in (4, 5, 6):
        assert allocator.allocate(1, after=int(slots[-1])).tolist() == [expected]
        slots = np.append(slots, expected)


def test_after_prefers_the_neighbour_over_the_tightest_run():
    allocator = make_allocator(free=[1, 8, 9, 10, 11])
    assert allocator.allocate(2, after=7).tolist() == [8, 9]


def test_after_takes_what_follows_and_then_the_tightest():
    allocator = make_allocator(free=[0, 1, 4, 5, 10, 11, 12])
    assert allocator.allocate(4, after=3).tolist() == [4, 5, 0, 1]


def test_after_without_free_neighbour_falls_back():
    allocator = make_allocator(free=[0, 1, 9])
    assert allocator.allocate(1, after=3).tolist() == [9]
    assert allocator.allocate(1, after=15).tolist() == [0]


def test_fragments_are_as_few_as_can_be():
    allocator = make_allocator(free=[0, 2, 3, 6, 7, 8, 12, 13])
    assert allocator.allocate(6).tolist() == [0, 2, 3, 6, 7, 8]
    assert allocator.allocate(2).tolist() == [12, 13]


def test_released_neighbours_become_one_run():
    allocator = SlotAllocator(12)
    allocator.allocate(12)
    allocator.release(np.array([3, 9, 4]), Owner.REQUEST)
    assert allocator.num_free_runs == 2
    allocator.release(np.array([8, 5, 6, 7]), Owner.REQUEST)
    assert allocator.num_free_runs == 1
    assert allocator.allocate(7).tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert allocator.num_free_runs == 0
    allocator.check()


def test_too_much_is_refused_and_changes_nothing():
    allocator = SlotAllocator(4)
    allocator.allocate(1)
    with pytest.raises(CapacityError, match="4 KV slots asked for, 3 free"):
        allocator.allocate(4, after=0)
    assert allocator.usage() == SlotUsage(free=3, request=1, cached=0, donor=0, total=4)
    allocator.check()


def test_slot_is_free_when_the_last_owner_lets_go():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(3)
    allocator.retain(slots, Owner.CACHE)
    allocator.retain(slots[1:], Owner.DONOR)
    assert allocator.usage() == SlotUsage(free=1, request=3, cached=0, donor=0, total=4)
    assert allocator.release(slots, Owner.REQUEST).tolist() == []
    assert allocator.usage() == SlotUsage(free=1, request=0, cached=3, donor=0, total=4)
    assert allocator.release(slots[::-1], Owner.CACHE).tolist() == [0]
    assert allocator.usage() == SlotUsage(free=2, request=0, cached=0, donor=2, total=4)
    assert allocator.release(slots[2:], Owner.DONOR).tolist() == [2]
    allocator.check()


def test_one_owner_may_hold_several_references():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.retain(slots, Owner.REQUEST)
    assert allocator.release(slots, Owner.REQUEST).tolist() == []
    assert allocator.release(slots, Owner.REQUEST).tolist() == [0, 1]


def test_transfer_moves_references_without_freeing():
    allocator = SlotAllocator(4)
    slots = allocator.allocate(2)
    allocator.transfer(slots, Owner.REQUEST, Owner.CACHE)
    assert allocator.usage().cached == 2
    with pytest.raises(CorruptCacheError):
        allocator.release(slots, Owner.REQUEST)
    assert allocator.release(slots, Owner.CACHE).tolist() == [0, 1]


@pytest.mark.parametrize("slots", [[0, 0], [-1], [4], [[0]], [0.5]])
def test_what_are_not_distinct_slots_is_refused(slots):
    allocator = SlotAllocator(4)
    allocator.allocate(4)
    for change in (allocator.retain, allocator.release):
        with pytest.raises(ConfigError):
            change(np.array(slots), Owner.REQUEST)
    with pytest.raises(ConfigError):
        allocator.transfer(np.array(slots), Owner.REQUEST, Owner.CACHE)
    assert allocator.usage().request == 4
    allocator.check()


def test_release_of_a_free_slot_among_held_ones_changes_nothing():
    allocator = SlotAllocator(4)
    allocator.allocate(2)
    with pytest.raises(CorruptCacheError, match="slot 2 is not held by REQUEST"):
        allocator.release(np.array([0, 2]), Owner.REQUEST)
    with pytest.raises(CorruptCacheError, match="slot 3 is free"):
        allocator.retain(np.array([1, 3]), Owner.CACHE)
    assert allocator.usage() == SlotUsage(free=2, request=2, cached=0, donor=0, total=4)
    allocator.check()


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError):
        SlotAllocator(0)
    with pytest.raises(ConfigError):
        SlotAllocator(4).allocate(-1)


def break_references(allocator):
    allocator._refs[Owner.DONOR, 0] = -1


def break_counts(allocator):
    allocator._class_sizes[0] += 1


def break_extents(allocator):
    allocator._extents.take(1)


def break_order(allocator):
    allocator._extents._ends[0] = 100


@pytest.mark.parametrize("damage", [break_references, break_counts, break_extents, break_order])
def test_check_finds_damage(damage):
    allocator = make_allocator(free=[1, 2, 5])
    allocator.check()
    damage(allocator)
    with pytest.raises(CorruptCacheError):
        allocator.check()


def test_allocator_needs_numpy_alone():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvgraft.memory as memory\n"
        "memory.SlotAllocator(4).allocate(2)\n"
        "try: memory.SlotPool\n"
        "except ImportError as error: sys.exit('kvgraft[torch]' not in str(error))\n"
        "sys.exit(2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_slots_are_counted_under_their_first_holder():
    allocator = SlotAllocator(8)
    slots = allocator.allocate(4)
    allocator.retain(slots, Owner.DONOR)
    allocator.retain(slots[:3], Owner.CACHE)
    assert allocator.num_counted(slots, Owner.DONOR) == 0, "the request holds all of them"
    allocator.release(slots, Owner.REQUEST)
    assert allocator.num_counted(slots, Owner.DONOR) == 1
    assert allocator.num_counted(slots[:3], Owner.CACHE) == 3
    allocator.release(slots[:3], Owner.CACHE)
    assert allocator.num_counted(slots, Owner.DONOR) == 4


def test_a_slot_that_is_named_more_than_once_gives_back_as_many_references():
    allocator = SlotAllocator(8)
    slots = allocator.allocate(4)
    for part in (slots, slots[:3], slots[:1]):
        allocator.retain(part, Owner.CACHE)
    allocator.release(slots, Owner.REQUEST)
    allocator.release_each(np.array([0, 1, 0, 2]), Owner.CACHE)
    assert allocator.usage().cached == 4
    allocator.release_each(np.array([0, 2, 1, 3]), Owner.CACHE)
    assert allocator.usage().free == 8
    allocator.release_each(np.empty(0, np.int64), Owner.CACHE)
    allocator.check()
    with pytest.raises(CorruptCacheError, match="not held"):
        allocator.release_each(np.array([5, 5]), Owner.CACHE)


CALLS = {
    "allocate": lambda slots: slots.allocate(7),
    "allocate after": lambda slots: slots.allocate(7, after=3),
    "retain": lambda slots: slots.retain(np.arange(4), Owner.CACHE),
    "release": lambda slots: slots.release(np.array([0, 2, 3]), Owner.REQUEST),
    "transfer": lambda slots: slots.transfer(np.arange(4), Owner.REQUEST, Owner.DONOR),
}


def fragmented():
    """Held: 0 to 3, 6, 9, 12, 15; no run of free slots has more than 2."""
    slots = SlotAllocator(17)
    slots.allocate(17)
    slots.release(np.array([4, 5, 7, 8, 10, 11, 13, 14, 16]), Owner.REQUEST)
    return slots


def state(slots):
    return slots.usage(), slots._refs.tolist(), slots._extents.slots().tolist()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_memory_changes_nothing(name):
    whole = fragmented()
    with FailingCalls() as calls:
        CALLS[name](whole)
    own = [(place, count) for place, count in calls.seen.items() if place.caller.startswith("/memory/")]
    assert len(own) > 3
    for place, count in own:
        for number in range(1, count + 1):
            slots = fragmented()
            before = state(slots)
            with pytest.raises(MemoryError), FailingCalls(place, number):
                CALLS[name](slots)
            assert state(slots) == before, (place, number)
