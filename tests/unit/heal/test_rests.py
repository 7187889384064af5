"""How long a text rests behind tries that came to nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraft.heal import Text
from kvgraft.heal.rests import Rests
from kvgraft.types import Namespace


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def text(seed, name=b"name"):
    return Text(name, Namespace("model"), np.arange(seed, seed + 20, dtype=np.int32), 1, 1, 0.0)


def rest_s(rests, clock, which):
    """How long it rests from now on, in steps of a second."""
    begun, now = clock.now, clock.now
    while rests.is_resting(which):
        clock.now += 1
    rest, clock.now = clock.now - begun, now
    return rest


def test_each_try_in_vain_makes_it_longer_up_to_a_limit(clock):
    rests = Rests(5.0, clock, lambda: 0.0)
    assert not rests.is_resting(text(1))
    assert rests.failed(text(1)) == 1
    assert rest_s(rests, clock, text(1)) == 5
    assert rests.interrupted(text(1)) == 1
    assert rest_s(rests, clock, text(1)) == 10
    assert rests.failed(text(1)) == 2
    assert rest_s(rests, clock, text(1)) == 20
    for _ in range(2_000):
        rests.interrupted(text(1))
    assert rest_s(rests, clock, text(1)) == 320


def test_others_do_not_rest_and_the_same_text_under_another_name_does(clock):
    rests = Rests(5.0, clock)
    rests.failed(text(1))
    assert not rests.is_resting(text(2))
    assert rests.is_resting(text(1, b"another"))


def test_what_was_computed_begins_anew(clock):
    rests = Rests(5.0, clock, lambda: 0.0)
    rests.failed(text(1))
    rests.done(text(1))
    assert not rests.is_resting(text(1))
    assert rests.failed(text(1)) == 1


def test_chance_makes_it_longer_by_half_at_most(clock):
    rests = Rests(4.0, clock, lambda: 1.0)
    rests.failed(text(1))
    assert rest_s(rests, clock, text(1)) == 6


def test_many_are_forgotten_and_not_kept_for_ever(clock):
    rests = Rests(5.0, clock)
    for seed in range(5_000):
        rests.failed(text(seed))
    assert not rests.is_resting(text(0))
    assert rests.is_resting(text(4_999))
