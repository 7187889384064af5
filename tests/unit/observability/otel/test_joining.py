from __future__ import annotations

import math

from tests.unit.observability.otel.exchanges import make_exchange
from tests.unit.observability.records import make_record

from kvgraft.observability.otel import joining
from kvgraft.observability.otel.joining import PATIENCE_S, Joining

TWO = (("answer-0", 0), ("answer-1", 0))


def test_halves_are_joined_in_whichever_order_they_come():
    exchange, records = make_exchange(choices=TWO), [make_record("answer-0"), make_record("answer-1")]
    for items in ([exchange, *records], [*reversed(records), exchange]):
        found = Joining()
        for item in items[:-1]:
            found.add(item)
            assert list(found.joined(exchange.ended)) == []
        found.add(items[-1])
        assert list(found.joined(exchange.ended)) == [(exchange, records)]
        assert list(found.joined(math.inf)) == []


def test_exchange_without_all_records_waits_no_longer_than_said():
    found, exchange = Joining(), make_exchange(choices=TWO)
    found.add(exchange)
    found.add(make_record("answer-1"))
    assert list(found.joined(exchange.ended + PATIENCE_S - 0.1)) == []
    assert list(found.joined(exchange.ended + PATIENCE_S)) == [(exchange, [make_record("answer-1")])]


def test_refused_exchange_waits_for_nothing():
    found, refused = Joining(), make_exchange(asked=None, status=400)
    found.add(refused)
    assert list(found.joined(refused.ended)) == [(refused, [])]


def test_records_that_nobody_asks_for_are_bounded(monkeypatch, caplog):
    monkeypatch.setattr(joining, "_MOST_RECORDS", 2)
    found, exchange = Joining(), make_exchange(choices=(("a", 0), ("d", 1)))
    for name in "abcd":
        found.add(make_record(name))
    found.add(exchange)
    assert list(found.joined(math.inf)) == [(exchange, [make_record("d")])]
    assert len(caplog.records) == 1
