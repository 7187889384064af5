"""What fails for every connection is logged with a traceback once a minute, not thousands of times a second."""

from __future__ import annotations

import logging

from kvgraft.http.traceback_limit import INTERVAL_S, TracebackLimit, limited_tracebacks


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def _raise(error):
    raise error


def fail(logger, error=MemoryError, message="connection %d"):
    for number in range(1000):
        try:
            _raise(error)
        except error:
            logger.exception(message, number)


def limited(caplog, name="limited"):
    clock, logger = Clock(), logging.getLogger(name)
    limit = TracebackLimit(clock)
    logger.addFilter(limit)
    return clock, logger


def test_a_thousand_failures_of_a_kind_are_one_line(caplog):
    _, logger = limited(caplog, "limited.once")
    fail(logger)
    assert [record.getMessage() for record in caplog.records] == ["connection 0"]


def test_the_next_minute_says_how_many_there_were(caplog):
    clock, logger = limited(caplog, "limited.later")
    fail(logger)
    clock.now += INTERVAL_S
    fail(logger)
    assert [record.getMessage() for record in caplog.records][1].startswith("connection 0 (and 999 times more")


def test_another_kind_of_failure_is_seen_at_once(caplog):
    _, logger = limited(caplog, "limited.other")
    fail(logger)
    fail(logger, OSError)
    assert len(caplog.records) == 2


def test_lines_without_a_traceback_pass(caplog):
    _, logger = limited(caplog, "limited.plain")
    for _ in range(3):
        logger.warning("no traceback")
    assert len(caplog.records) == 3


def test_loggers_are_as_they_were_when_a_server_has_ended():
    logger = logging.getLogger("asyncio")
    before = list(logger.filters)
    with limited_tracebacks():
        assert len(logger.filters) == len(before) + 1
    assert logger.filters == before
