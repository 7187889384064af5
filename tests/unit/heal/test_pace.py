"""How long a server has been idle, and what is left of a minute's tokens."""

from __future__ import annotations

import math

import pytest

from kvgraft.heal.pace import IdleClock, TokenBudget


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def test_a_server_is_in_use_until_it_was_seen_idle_for_a_while(clock):
    idle = IdleClock(clock)
    assert idle.idle_s == 0
    clock.now += 3
    assert idle.idle_s == 3
    idle.busy()
    assert idle.idle_s == 0


def test_a_minute_has_so_many_tokens(clock):
    budget = TokenBudget(600, clock)
    assert budget.allows(600)
    budget.spend(400)
    assert budget.allows(200)
    assert not budget.allows(201)
    clock.now += 20.0
    assert budget.allows(400)
    assert not budget.allows(401)
    clock.now += 3600
    budget.spend(600)
    assert not budget.allows(1)


def test_a_text_longer_than_a_minutes_tokens_waits_for_all_of_them_and_is_owed(clock):
    budget = TokenBudget(600, clock)
    budget.spend(1)
    assert not budget.allows(5_000)
    clock.now += 1
    assert budget.allows(5_000)
    budget.spend(5_000)
    clock.now += 60 * 4_400 / 600 - 0.1
    assert not budget.allows(1)
    clock.now += 0.3
    assert budget.allows(1)


def test_without_a_limit_everything_is_allowed(clock):
    budget = TokenBudget(math.inf, clock)
    budget.spend(10**9)
    assert budget.allows(10**9)
