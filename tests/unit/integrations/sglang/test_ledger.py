"""Slots and the texts in them, against a dictionary."""

from __future__ import annotations

from array import array

import numpy as np

from kvgraft.integrations.sglang.ledger import SlotLedger
from kvgraft.integrations.sglang.texts import Origin, TreeText
from kvgraft.types import Namespace


def make_text(length=100):
    return TreeText(array("q", range(length)), Namespace("m"), None, None, 0, 0, Origin("r"))


def pieces(ledger, *slots):
    return [(piece.text, piece.start, piece.length, piece.first) for piece in ledger.pieces(np.array(slots, np.int64))]


def test_slots_tell_their_text_and_where_in_it_they_lie():
    ledger, text = SlotLedger(64), make_text()
    ledger.claim(text, 10, np.array([7, 3, 9, 4]))
    assert pieces(ledger, 7, 3, 9, 4) == [(text, 10, 4, 0)]
    assert pieces(ledger, 3, 9) == [(text, 11, 2, 0)]
    assert pieces(ledger, 7, 9, 4, 1) == [(text, 10, 1, 0), (text, 12, 2, 1)]
    assert pieces(ledger) == []


def test_texts_without_slots_are_forgotten():
    ledger, first, second = SlotLedger(64), make_text(), make_text()
    ledger.claim(first, 0, np.array([1, 2, 3]))
    ledger.claim(second, 5, np.array([2, 3]))
    assert pieces(ledger, 1, 2, 3) == [(first, 0, 1, 0), (second, 5, 2, 1)]
    ledger.forget(np.array([1]))
    assert len(ledger) == 1
    ledger.forget(np.array([2, 3, 40]))
    assert len(ledger) == 0
    assert pieces(ledger, 1, 2, 3) == []


def test_random_claims_agree_with_a_dictionary(rng):
    ledger, model = SlotLedger(200), {}
    for _ in range(300):
        slots = rng.permutation(200)[: rng.integers(1, 40)]
        if rng.random() < 0.6:
            text, start = make_text(), int(rng.integers(0, 50))
            ledger.claim(text, start, slots)
            model.update({int(slot): (text, start + index) for index, slot in enumerate(slots)})
        else:
            ledger.forget(slots)
            for slot in slots:
                model.pop(int(slot), None)
        asked = rng.permutation(200)
        told = {}
        for piece in ledger.pieces(asked):
            for index in range(piece.length):
                told[int(asked[piece.first + index])] = (piece.text, piece.start + index)
        assert told == model
        assert len(ledger) == len({id(text) for text, _ in model.values()})
