"""DonorQueue: Greedy-Dual-Size-Frequency order."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors.eviction import DonorQueue
from kvgraft.errors import CorruptCacheError


def make_queue(**values):
    queue = DonorQueue()
    for name, value in values.items():
        queue.put(name, value)
    return queue


def put_and_pop(queue, name):
    queue.put(name, 1)
    return queue.pop()


def drain(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_equal_values_leave_in_order_of_arrival():
    assert drain(make_queue(a=1, b=1, c=1)) == ["a", "b", "c"]


def test_lowest_value_leaves_first():
    assert drain(make_queue(a=3, b=1, c=2)) == ["b", "c", "a"]


def test_new_value_replaces_the_old_one():
    queue = make_queue(a=1, b=2)
    queue.put("a", 5)
    assert len(queue) == 2
    assert drain(queue) == ["b", "a"]


def test_value_ages_as_others_leave():
    queue = make_queue(popular=3)
    # Each newcomer is worth 1 more than the clock, which the one before has set: 1, 2, 3. At 3 the popular one is older.
    assert [put_and_pop(queue, name) for name in "abc"] == ["a", "b", "popular"]
    assert drain(queue) == ["c"]


def test_iteration_is_the_order_of_leaving_and_changes_nothing():
    rng = np.random.default_rng(0)
    queue = DonorQueue()
    for step in range(500):
        queue.put(int(rng.integers(0, 100)), float(rng.integers(0, 20)))
        if step % 3 == 0:
            queue.discard(int(rng.integers(0, 100)))
        if step % 7 == 0 and len(queue):
            queue.pop()
        queue.check()
    order = list(queue)
    assert len(order) == len(queue) == len(set(order))
    assert drain(queue) == order


def test_discard_takes_out_and_may_be_repeated():
    queue = make_queue(a=1, b=2)
    queue.discard("a")
    queue.discard("a")
    assert "a" not in queue
    assert drain(queue) == ["b"]


def test_outdated_entries_do_not_pile_up():
    queue = make_queue(a=1, b=1)
    for step in range(10_000):
        queue.put("a", step)
    assert len(queue._heap) < 100
    assert drain(queue) == ["b", "a"]


@pytest.mark.parametrize("damage", [lambda queue: queue._heap.clear(), lambda queue: queue._heap.reverse()])
def test_check_finds_damage(damage):
    queue = make_queue(a=1, b=2, c=3)
    damage(queue)
    with pytest.raises(CorruptCacheError):
        queue.check()
