"""The eviction queue against sorting."""

from __future__ import annotations

import gc
import random

import pytest

from kvgraft.errors import CorruptCacheError
from kvgraft.prefix.eviction.policies import make_eviction_policy
from kvgraft.prefix.eviction.queue import NOT_QUEUED, EvictionQueue
from kvgraft.prefix.radix.node import RadixNode
from kvgraft.prefix.results import NO_SLOTS


def make_node(last_access):
    return RadixNode(None, None, None, b"", NO_SLOTS, end=0, now=last_access)


def make_queue(times):
    queue = EvictionQueue(make_eviction_policy("lru"))
    for time in times:
        queue.add(make_node(time))
    return queue


def drain(queue):
    return [queue.pop().last_access for _ in range(len(queue))]


def test_pop_gives_the_smallest_key_first():
    times = random.Random(0).sample(range(1000), 200)
    assert drain(make_queue(times)) == sorted(times)


def test_random_changes_keep_the_order():
    rng = random.Random(1)
    queue = make_queue(range(50))
    for now in range(1_000):
        node = rng.choice(list(queue)) if len(queue) else None
        action = rng.choice(["add", "update", "remove", "pop"])
        if action == "add" or node is None:
            queue.add(make_node(rng.randrange(2_000)))
        elif action == "update":
            node.last_access = rng.randrange(2_000) + now
            queue.update(node)
        elif action == "remove":
            queue.remove(node)
            assert node.queue_index == NOT_QUEUED
        else:
            smallest = min(other.last_access for other in queue)
            assert queue.pop().last_access == smallest
        queue.check()
    left = sorted(node.last_access for node in queue)
    assert drain(queue) == left


def test_what_is_made_and_used_in_order_of_time_needs_no_heap():
    queue = make_queue(range(20))
    for now, node in enumerate(list(queue)[::3], start=20):
        node.last_access = now
        queue.update(node)
    queue.check()
    assert not queue._items
    assert drain(queue) == sorted(set(range(20)) - set(range(0, 20, 3))) + list(range(20, 27))


def test_an_old_node_that_is_taken_back_leaves_before_younger_ones():
    queue = make_queue([10, 20, 30])
    old = make_node(15)
    queue.add(old)
    queue.check()
    assert queue.first().last_access == 10
    assert drain(queue) == [10, 15, 20, 30]


def test_a_node_taken_back_and_then_used_is_the_last_to_leave():
    queue = make_queue([10, 20])
    old = make_node(15)
    queue.add(old)
    old.last_access = 40
    queue.update(old)
    queue.check()
    assert drain(queue) == [10, 20, 40]


@pytest.mark.parametrize("policy", ["fifo", "mru", "lfu"])
def test_an_update_restores_the_order_of_policies_whose_keys_do_not_grow(policy):
    rng = random.Random(2)
    order = make_eviction_policy(policy)
    queue = EvictionQueue(order)
    nodes = [make_node(time) for time in range(40)]
    for node in nodes:
        queue.add(node)
    for now in range(40, 240):
        node = rng.choice(nodes)
        node.last_access, node.hit_count = now, node.hit_count + 1
        queue.update(node)
        queue.check()
    assert [queue.pop() for _ in nodes] == sorted(nodes, key=order)


def test_check_says_so_if_the_run_is_out_of_order():
    queue = make_queue([1, 2, 3])
    queue._move_to_end(queue.first())
    with pytest.raises(CorruptCacheError, match="out of order"):
        queue.check()


@pytest.mark.parametrize("link", ["queue_before", "queue_after"])
def test_check_says_so_if_the_run_has_lost_a_node(link):
    queue = make_queue([1, 2, 3, 4])
    node = list(queue)[1]
    setattr(node, link, getattr(getattr(node, link), link))
    with pytest.raises(CorruptCacheError, match="broken links"):
        queue.check()


def test_check_says_so_if_a_node_of_the_heap_has_neighbours():
    queue = make_queue([1, 3, 2])
    queue._items[0].queue_before = queue.first()
    with pytest.raises(CorruptCacheError, match="neighbours"):
        queue.check()


def test_what_has_left_keeps_no_neighbour_alive():
    queue = make_queue([1, 2, 3, 4])
    first, second, third, fourth = queue
    queue.pop()
    queue.remove(third)
    queue.clear()
    assert not any(node.queue_before or node.queue_after for node in (first, second, third, fourth))


def test_a_long_run_is_freed_without_recursion():
    queue = make_queue(range(200_000))
    assert len(queue) == 200_000
    del queue
    assert gc.collect() >= 200_000


def test_clear_withdraws_all():
    queue = make_queue([3, 1, 2])
    nodes = list(queue)
    queue.clear()
    queue.check()
    assert len(queue) == 0
    assert {node.queue_index for node in nodes} == {NOT_QUEUED}


def test_check_says_so_if_a_key_is_lost():
    queue = make_queue([3, 1, 2])
    queue._keys.pop()
    with pytest.raises(CorruptCacheError, match="1 keys for 2 nodes"):
        queue.check()
