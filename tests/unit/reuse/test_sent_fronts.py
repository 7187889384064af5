"""What readers are sent of the text before a donor: each piece once, and never less than they need to know all of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors.front import front_digest
from kvgraft.reuse import sent_fronts
from kvgraft.reuse.donor_events import DonorPlace, TokensBefore
from kvgraft.reuse.sent_fronts import STEP, ReceivedFronts, SentFronts

KEY, OTHER_KEY = b"k" * 16, b"o" * 16


class Wire:
    """A sender and a reader of one stream."""

    def __init__(self, max_tokens=1 << 20):
        self.sent, self.received = SentFronts(), ReceivedFronts(max_tokens)
        self.num_sent = 0

    def turn(self, text, start, key=KEY):
        """Announce `text[start:]`; what the reader makes of it."""
        sent = self.sent.send(key, text[:start], text[start:])
        self.num_sent = len(sent.token_ids)
        return self.received.receive(key, DonorPlace(start, front_digest(key, text[:start])), sent, text[start:])


def tokens(seed, count):
    return np.random.default_rng(seed).integers(0, 30_000, count).astype(np.int32)


def is_all(wire, beginning, front):
    text = wire.received.text(beginning)
    return text is not None and np.array_equal(text, front)


def test_a_turn_sends_what_is_new_and_the_reader_knows_all():
    wire, text = Wire(), tokens(1, 25_000)
    first = wire.turn(text, 24_000)
    assert wire.num_sent == 24_000
    fronts = [(first, text[:24_000])]
    for seed in range(2, 8):
        longer = np.concatenate([text, tokens(seed, 500)])
        fronts.append((wire.turn(longer, len(text)), text))
        assert wire.num_sent < STEP
        text = longer
    assert all(is_all(wire, beginning, front) for beginning, front in fronts)
    assert wire.received.num_tokens <= len(text)


def test_copies_between_two_runs_are_sent_with_the_second():
    wire, text = Wire(), tokens(1, 3_000)
    wire.turn(text[:1_000], 700)
    beginning = wire.turn(text, 2_500)
    assert 1_500 <= wire.num_sent < 1_500 + STEP
    assert is_all(wire, beginning, text[:2_500])


def test_an_edit_branches_where_it_is():
    wire, text = Wire(), tokens(1, 4_000)
    wire.turn(text, 3_500)
    edited = text.copy()
    edited[2_000] += 1
    beginning = wire.turn(edited, 3_500)
    assert 1_500 <= wire.num_sent < 1_500 + STEP
    assert is_all(wire, beginning, edited[:3_500])
    assert wire.received.num_tokens <= 4_000 + 2_000 + STEP


def test_texts_of_two_namespaces_share_nothing():
    wire, text = Wire(), tokens(1, 2_000)
    wire.turn(text, 1_500)
    assert is_all(wire, wire.turn(text, 1_500, OTHER_KEY), text[:1_500])
    assert wire.num_sent == 1_500


def test_a_short_front_has_no_piece():
    wire, text = Wire(), tokens(1, 150)
    assert is_all(wire, wire.turn(text, 100), text[:100])
    assert wire.received.num_tokens == 0


def test_a_reader_that_came_late_or_forgot_does_not_guess():
    wire, text = Wire(), tokens(1, 2_000)
    wire.turn(text, 1_500)
    wire.received = ReceivedFronts(1 << 20)
    assert wire.turn(np.concatenate([text, tokens(2, 100)]), 2_000) is None
    wire = Wire(max_tokens=4 * STEP)
    beginning = wire.turn(text, 1_500)
    assert wire.received.text(beginning) is None
    assert wire.received.num_tokens == 4 * STEP


def test_a_sender_forgets_before_its_readers_do(monkeypatch):
    """So that what a reader has forgotten is sent to it again."""
    monkeypatch.setattr(sent_fronts, "_MOST_SENT", 8)
    wire = Wire(max_tokens=16 * STEP)
    for seed in range(20):
        text = tokens(seed % 5, 1_200)
        assert is_all(wire, wire.turn(text, 1_000), text[:1_000])
    assert len(wire.sent._sent) == 8


@pytest.mark.parametrize("wrong", ["token", "start", "digest", "base", "missing"])
def test_what_is_not_all_that_stands_before_a_text_is_not_taken_for_it(wrong):
    wire, text = Wire(), tokens(1, 1_000)
    wire.turn(text, 700)
    front, before = front_digest(KEY, text[:900]), text[768:900].copy()
    base, start = front_digest(KEY, text[:768]), 900
    if wrong == "token":
        before[3] += 1
    elif wrong == "start":
        start += 1
    elif wrong == "digest":
        front = front_digest(KEY, text[:899])
    elif wrong == "base":
        base = front_digest(KEY, text[:767])
    else:
        before = before[:-1]
    place = DonorPlace(start, front)
    assert wire.received.receive(KEY, place, TokensBefore(base, before), text[900:]) is None
