"""Server-sent events, cut anywhere."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.bench.sse import EventParser

STREAM = (
    'data: {"text": "größer"}\n\n: comment\n\ndata:first\r\ndata: second\r\n\r\n'
    "event: x\nid: 1\ndata: y\n\n\ndata: [DONE]\n\n"
)
EVENTS = ['{"text": "größer"}', "first\nsecond", "y", "[DONE]"]


def parse(pieces):
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM.encode()))))
def test_events_do_not_depend_on_where_bytes_are_cut(cuts):
    data = STREAM.encode()
    edges = [0, *sorted(cuts), len(data)]
    assert parse(data[a:b] for a, b in itertools.pairwise(edges)) == EVENTS


def test_single_bytes():
    assert parse(bytes([byte]) for byte in STREAM.encode()) == EVENTS


@pytest.mark.parametrize("data", [b"", b"\n\n\n", b"data: not ended", b"data: not ended\n", b": only a comment\n\n"])
def test_what_has_not_ended_is_no_event(data):
    assert parse([data]) == []


def test_bytes_that_are_no_text_do_not_stop_it():
    assert parse([b"data: \xff\n\n"]) == ["\ufffd"]
