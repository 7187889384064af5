"""The eviction queue against sorting."""

from __future__ import annotations

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


def test_clear_withdraws_all():
    queue = make_queue([3, 1, 2])
    nodes = list(queue)
    queue.clear()
    assert len(queue) == 0
    assert not any(node.is_queued for node in nodes)


def test_check_says_so_if_a_key_is_lost():
    queue = make_queue([3, 1, 2])
    queue._keys.pop()
    with pytest.raises(CorruptCacheError, match="2 keys for 3 nodes"):
        queue.check()
