from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from kvgraft.donors import CostModel, DonorCatalogue
from kvgraft.reuse import Lookup
from kvgraft.types import GraftPlan, Match, MissReason, Namespace

NAMESPACE = Namespace("model")
FREE = CostModel(attention_per_key=0, copy_per_token=0, per_span=0, recompute_ratio=0)
TEXT = np.arange(1000, 1200)


class Clock:
    """Seconds that pass when somebody looks a prompt up."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class SlowDonors:
    """A catalogue whose lookups take as long as they are told to."""

    def __init__(self, catalogue, clock):
        self.catalogue, self.clock, self.seconds, self.calls = catalogue, clock, 0.0, 0

    def __len__(self):
        return len(self.catalogue)

    def find(self, namespace, token_ids, *, start=0, max_generation=None):
        self.calls += 1
        self.clock.now += self.seconds
        return self.catalogue.find(namespace, token_ids, start=start, max_generation=max_generation)


@pytest.fixture
def catalogue():
    catalogue = DonorCatalogue(4096)
    catalogue.add(NAMESPACE, TEXT, None)
    return catalogue


def prompt():
    return np.concatenate([np.arange(50), TEXT, np.arange(300, 350)])


def make_lookup(donors, **changes):
    return Lookup(donors, **{"min_run": 16, "max_generation": 2} | changes)


def test_match_becomes_a_plan(catalogue):
    found = make_lookup(catalogue).find(NAMESPACE, prompt(), 0, FREE)
    assert isinstance(found.planned, GraftPlan)
    assert [(s.target_start, s.length) for s in found.planned.spans] == [(50, 200)]
    assert found.matches == found.planned.spans


def test_nothing_is_looked_up_without_donors():
    assert make_lookup(DonorCatalogue(4096)).find(NAMESPACE, prompt(), 0, FREE).planned.reason is MissReason.NO_DONORS


def test_matches_in_front_of_the_prefix_are_found_on_request(catalogue):
    lookup = make_lookup(catalogue)
    assert lookup.find(NAMESPACE, prompt(), 100, FREE).matches[0].target_start == 100
    assert lookup.find(NAMESPACE, prompt(), 100, FREE, start=0).matches[0].target_start == 50


def test_too_little_saved_is_a_miss(catalogue):
    found = make_lookup(catalogue, min_saved_tokens=201).find(NAMESPACE, prompt(), 0, FREE)
    assert found.planned.reason is MissReason.NOT_WORTH_IT


def test_what_is_computed_twice_to_look_is_not_saved(catalogue):
    """200 tokens are reused and the 50 behind them run once more."""
    costs = dataclasses.replace(FREE, recompute_ratio=0.1, tail_passes=1.0)
    enough, too_few = (
        make_lookup(catalogue, min_saved_tokens=saved).find(NAMESPACE, prompt(), 0, costs).planned
        for saved in (130, 131)
    )
    assert isinstance(enough, GraftPlan)
    assert too_few.reason is MissReason.NOT_WORTH_IT


def test_engine_may_cut_matches_to_what_it_can_load(catalogue):
    def halves(matches, exact_len, num_tokens):
        assert (exact_len, num_tokens) == (0, 300)
        return [Match(m.target_start, m.donor_id, m.donor_start, m.length // 2) for m in matches]

    found = make_lookup(catalogue, cut=halves).find(NAMESPACE, prompt(), 0, FREE)
    assert found.planned.spans[0].length == 100
    nothing = make_lookup(catalogue, cut=lambda *_: []).find(NAMESPACE, prompt(), 0, FREE)
    assert nothing.planned.reason is MissReason.NOT_WORTH_IT


def test_lookup_that_would_miss_its_deadline_is_not_begun_and_is_tried_again(catalogue):
    clock = Clock()
    donors = SlowDonors(catalogue, clock)
    lookup = make_lookup(donors, deadline_ms=10, clock=clock)
    donors.seconds = 0.1
    assert isinstance(lookup.find(NAMESPACE, prompt(), 0, FREE).planned, GraftPlan)
    reasons = []
    donors.seconds = 0.0
    while donors.calls == 1:
        planned = lookup.find(NAMESPACE, prompt(), 0, FREE).planned
        reasons.append(getattr(planned, "reason", None))
    assert reasons[0] is MissReason.DEADLINE
    assert reasons[-1] is None, "a slow spell must not end reuse"


def test_one_slow_lookup_among_many_is_no_experience(catalogue):
    clock = Clock()
    donors = SlowDonors(catalogue, clock)
    lookup = make_lookup(donors, deadline_ms=10, clock=clock)
    for seconds in (0, 0, 0, 1, 0):
        donors.seconds = seconds
        assert isinstance(lookup.find(NAMESPACE, prompt(), 0, FREE).planned, GraftPlan)


def test_without_a_deadline_speed_does_not_matter(catalogue):
    clock = Clock()
    donors = SlowDonors(catalogue, clock)
    donors.seconds = 100.0
    lookup = make_lookup(donors, clock=clock)
    for _ in range(3):
        assert isinstance(lookup.find(NAMESPACE, prompt(), 0, FREE).planned, GraftPlan)


def test_failure_is_a_counted_miss(catalogue, caplog):
    class Broken(SlowDonors):
        def find(self, *_, **__):
            raise RuntimeError("no memory")

    lookup = make_lookup(Broken(catalogue, Clock()))
    found = lookup.find(NAMESPACE, prompt(), 0, FREE)
    assert found.planned.reason is MissReason.ERROR
    assert found.planned.detail == "RuntimeError: no memory"
    assert lookup.num_errors == 1
    assert "lookup failed" in caplog.text
