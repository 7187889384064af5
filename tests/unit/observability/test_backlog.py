from __future__ import annotations

import logging
import threading

from kvgraft.observability.backlog import Backlog


def test_what_was_left_is_taken_in_order():
    taken = []
    backlog = Backlog("test", taken.extend)
    for item in range(1_000):
        backlog.put(item)
    backlog.close()
    assert taken == list(range(1_000))


def test_full_backlog_drops_and_says_so_once(caplog):
    taken, is_open, has_begun = [], threading.Event(), threading.Event()

    def take(batch):
        has_begun.set()
        is_open.wait()
        taken.extend(batch)

    backlog = Backlog("work of the test", take, limit=3)
    has_begun.wait()
    with caplog.at_level(logging.WARNING):
        for item in range(10):
            backlog.put(item)
    is_open.set()
    backlog.close()
    assert taken == [0, 1, 2]
    assert [record.getMessage() for record in caplog.records] == [
        "work of the test cannot keep up: 3 records wait, and further ones are dropped"
    ]


def test_failure_is_logged_once_and_later_batches_are_taken(caplog):
    taken, calls, has_failed_twice = [], [], threading.Event()

    def take(batch):
        calls.append(batch)
        if len(calls) < 3:
            raise OSError("no disk")
        has_failed_twice.set()
        taken.extend(batch)

    backlog = Backlog("work of the test", take)
    assert has_failed_twice.wait(60)
    backlog.put("late")
    backlog.close()
    assert taken == ["late"]
    assert [record.getMessage() for record in caplog.records] == [
        "work of the test failed; further failures of it are not logged"
    ]
