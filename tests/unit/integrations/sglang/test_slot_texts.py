"""Slots and the texts in them, against a dictionary."""

from __future__ import annotations

from array import array

import numpy as np

from kvgraft.integrations.sglang.donors.slot_texts import SlotTexts
from kvgraft.integrations.sglang.donors.texts import Origin, TreeText
from kvgraft.types import Namespace


def make_text(length=100):
    return TreeText(array("q", range(length)), Namespace("m"), None, None, 0, 0, Origin("r"))


def parts(texts, *slots):
    return [(part.text, part.start, part.length, part.first) for part in texts.in_slots(np.array(slots, np.int64))]


def test_slots_tell_their_text_and_where_in_it_they_lie():
    texts, text = SlotTexts(64), make_text()
    texts.claim(text, 10, np.array([7, 3, 9, 4]))
    assert parts(texts, 7, 3, 9, 4) == [(text, 10, 4, 0)]
    assert parts(texts, 3, 9) == [(text, 11, 2, 0)]
    assert parts(texts, 7, 9, 4, 1) == [(text, 10, 1, 0), (text, 12, 2, 1)]
    assert parts(texts) == []


def test_texts_without_slots_are_forgotten():
    texts, first, second = SlotTexts(64), make_text(), make_text()
    texts.claim(first, 0, np.array([1, 2, 3]))
    texts.claim(second, 5, np.array([2, 3]))
    assert parts(texts, 1, 2, 3) == [(first, 0, 1, 0), (second, 5, 2, 1)]
    texts.forget(np.array([1]))
    assert len(texts) == 1
    texts.forget(np.array([2, 3, 40]))
    assert len(texts) == 0
    assert parts(texts, 1, 2, 3) == []


def test_random_claims_agree_with_a_dictionary(rng):
    texts, model = SlotTexts(200), {}
    for _ in range(300):
        slots = rng.permutation(200)[: rng.integers(1, 40)]
        if rng.random() < 0.6:
            text, start = make_text(), int(rng.integers(0, 50))
            texts.claim(text, start, slots)
            model.update({int(slot): (text, start + index) for index, slot in enumerate(slots)})
        else:
            texts.forget(slots)
            for slot in slots:
                model.pop(int(slot), None)
        asked = rng.permutation(200)
        told = {}
        for part in texts.in_slots(asked):
            for index in range(part.length):
                told[int(asked[part.first + index])] = (part.text, part.start + index)
        assert told == model
        assert len(texts) == len({id(text) for text, _ in model.values()})
