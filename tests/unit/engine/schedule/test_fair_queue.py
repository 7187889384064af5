from __future__ import annotations

import pytest

from kvgraft.engine.schedule.fair_queue import FairQueue


def drain(queue):
    return [queue.pop() for _ in range(len(queue))]


def test_one_tenant_is_a_fifo():
    queue = FairQueue()
    for i in range(5):
        queue.push(i, "a", cost=10 - i)
    assert drain(queue) == [0, 1, 2, 3, 4]


def test_tenants_get_equal_work_not_equal_turns():
    queue = FairQueue()
    for i in range(6):
        queue.push(("big", i), "big", cost=300)
        queue.push(("small", i), "small", cost=100)
    order = [queue.pop()[0] for _ in range(8)]
    assert order.count("small") == 5 or order.count("small") == 6


def test_late_tenant_does_not_wait_for_a_backlog_and_earns_nothing_by_idling():
    queue = FairQueue()
    for i in range(100):
        queue.push(("a", i), "a", cost=10)
    for _ in range(50):
        queue.pop()
    for i in range(3):
        queue.push(("b", i), "b", cost=10)
    assert [queue.pop()[0] for _ in range(6)].count("b") == 3


def test_front_goes_before_all_and_the_last_put_there_is_first():
    queue = FairQueue()
    queue.push("x", "a", 1)
    queue.push_front("y")
    queue.push_front("z")
    assert queue.peek() == "z"
    assert drain(queue) == ["z", "y", "x"]


def test_removed_item_is_gone_and_unknown_one_is_an_error():
    queue = FairQueue()
    items = [object() for _ in range(3)]
    for item in items:
        queue.push(item, "a", 1)
    queue.remove(items[0])
    assert drain(queue) == items[1:]
    with pytest.raises(KeyError):
        queue.remove(items[0])


def test_tenant_does_not_pay_for_what_left_the_queue_unserved():
    """Clients that disconnect while they wait, or after a deadline: their tenant has got nothing."""
    queue = FairQueue()
    left = [object() for _ in range(10)]
    for item in left:
        queue.push(item, "a", cost=100)
    for i in range(20):
        queue.push(("b", i), "b", cost=10)
    for item in left:
        queue.remove(item)
    queue.push("a", "a", cost=10)
    assert "a" in drain(queue)[:2]


def test_those_behind_one_that_left_move_up_and_keep_their_order():
    queue = FairQueue()
    items = [object() for _ in range(4)]
    for item in items:
        queue.push(item, "a", cost=100)
    for i in range(40):
        queue.push(("b", i), "b", cost=10)
    queue.remove(items[1])
    order = drain(queue)
    places = [order.index(item) for item in (items[0], items[2], items[3])]
    assert places == sorted(places)
    assert places[1] <= 12, "after as much of b's as of a's first"


def test_endless_row_of_new_tenants_does_not_starve_an_old_one():
    queue = FairQueue()
    for i in range(3):
        queue.push(("old", i), "old", cost=10)
    served = []
    for i in range(60):
        queue.push(("new", i), f"new {i}", cost=10)
        served.append(queue.pop()[0])
    assert served.count("old") == 3


def test_tenants_of_the_past_are_forgotten():
    queue = FairQueue()
    for i in range(10_000):
        queue.push(i, f"tenant {i}", 1)
        queue.pop()
    assert len(queue._finish) < 50
