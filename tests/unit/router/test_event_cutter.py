"""Where a stream of events is cut, however it comes, and how much of it is kept back."""

from __future__ import annotations

import random

import pytest

from kvgraft.router.events import EventCutter

EVENTS = b"data: 1\n\n: comment\n\ndata: 2\r\n\r\nid: 3\ndata: 3\n\n" + b"data: " + b"x" * 500 + b"\n\n"


def pieces_of(data, dice, longest):
    while data:
        length = dice.randint(1, longest)
        yield data[:length]
        data = data[length:]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_changed_and_what_is_passed_on_ends_with_an_event(seed):
    dice, cutter, told = random.Random(seed), EventCutter(), b""
    for piece in pieces_of(EVENTS * 3 + b"data: rest", dice, 1 + seed):
        told += cutter.take(piece)
        assert told.endswith((b"\n\n", b"\r\n\r\n", b"\n")) or not told
    assert told == EVENTS * 3
    assert cutter.rest() == b"data: rest"
    assert cutter.rest() == b""


@pytest.mark.parametrize("length", [7, 1_000, 70_000])
def test_long_events_are_passed_on_as_they_come(length):
    """In bounded memory; what follows them is cut again where events end."""
    cutter, told, size = EventCutter(), [], 300_000
    event = b"data: " + b"x" * size + b"\n\n"
    for start in range(0, len(event), length):
        told.append(cutter.take(event[start : start + length]))
        assert len(cutter._held) <= 1 << 16
        assert cutter.is_inside == (any(told) and start + length < len(event))
    assert b"".join(told) == event
    assert max(map(len, told)) <= (1 << 16) + length
    assert cutter.take(b"data: 1\n\ndata") == b"data: 1\n\n"
