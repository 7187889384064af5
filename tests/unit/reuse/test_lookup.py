from __future__ import annotations

import numpy as np
import pytest

from kvgraft.donors import CostModel, DonorCatalogue, DonorQuery
from kvgraft.reuse.lookup import Lookup
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

    def find(self, query):
        self.calls += 1
        self.clock.now += self.seconds
        return self.catalogue.find(query)


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


def test_engine_may_cut_matches_to_what_it_can_load(catalogue):
    def halves(matches, prefix_len, num_tokens):
        assert (prefix_len, num_tokens) == (0, 300)
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
        def find(self, query):
            raise RuntimeError("no memory")

    lookup = make_lookup(Broken(catalogue, Clock()))
    found = lookup.find(NAMESPACE, prompt(), 0, FREE)
    assert found.planned.reason is MissReason.ERROR
    assert found.planned.detail == "RuntimeError: no memory"
    assert lookup.num_errors == 1
    assert "lookup failed" in caplog.text


class Proposing:
    """A proposer that says what it is told to, and what it was asked."""

    def __init__(self, *donor_ids):
        self.donor_ids, self.asked = donor_ids, []

    def propose(self, namespace, token_ids):
        self.asked.append((namespace, len(token_ids)))
        return self.donor_ids


class TestProposer:
    @pytest.fixture
    def forgetful(self, catalogue):
        catalogue.finder.index.clear()
        return catalogue

    def test_brings_a_donor_back_that_the_index_lost(self, forgetful):
        (donor,) = forgetful
        proposer = Proposing(donor.donor_id)
        lookup = make_lookup(forgetful, proposer=proposer)
        found = lookup.find(NAMESPACE, prompt(), 0, FREE)
        assert [(s.target_start, s.length) for s in found.planned.spans] == [(50, 200)]
        assert proposer.asked == [(NAMESPACE, 300)]
        assert (lookup.proposals.donors, lookup.proposals.tokens) == (1, 200)

    def test_nothing_is_asked_where_matches_leave_no_run_out(self, catalogue):
        proposer = Proposing()
        lookup = make_lookup(catalogue, proposer=proposer)
        lookup.find(NAMESPACE, np.concatenate([np.arange(16), TEXT]), 0, FREE)
        lookup.find(NAMESPACE, np.concatenate([np.arange(60), TEXT]), 50, FREE)
        assert proposer.asked == []
        lookup.find(NAMESPACE, np.concatenate([np.arange(17), TEXT]), 0, FREE)
        assert len(proposer.asked) == 1

    def test_proposals_that_add_nothing_change_nothing(self, catalogue):
        (donor,) = catalogue
        lookup = make_lookup(catalogue, proposer=Proposing(donor.donor_id, 99))
        assert (
            lookup.find(NAMESPACE, prompt(), 0, FREE).matches
            == make_lookup(catalogue).find(NAMESPACE, prompt(), 0, FREE).matches
        )
        assert lookup.proposals.tokens == 0

    def test_without_proposals_donors_are_searched_once(self, catalogue):
        donors = SlowDonors(catalogue, Clock())
        make_lookup(donors, proposer=Proposing()).find(NAMESPACE, prompt(), 0, FREE)
        assert donors.calls == 1

    def test_one_that_fails_is_counted_and_loses_nothing(self, catalogue, monkeypatch, caplog):
        proposer = Proposing()
        monkeypatch.setattr(proposer, "propose", None)
        lookup = make_lookup(catalogue, proposer=proposer)
        assert isinstance(lookup.find(NAMESPACE, prompt(), 0, FREE).planned, GraftPlan)
        assert lookup.num_errors == 1
        assert "a proposer failed" in caplog.text


class TestReading:
    """Donors whose K/V lie far away."""

    @staticmethod
    def costs_of(cold, cost):
        return lambda match: cost if match.donor_id == cold else 0.0

    def test_the_nearer_of_two_equal_donors_is_taken(self):
        catalogue = DonorCatalogue(4096)
        near = catalogue.add(NAMESPACE, TEXT, None).donor.donor_id
        far = catalogue.add(NAMESPACE, TEXT, None, is_stored=True).donor.donor_id
        assert {match.donor_id for match in catalogue.find(DonorQuery(NAMESPACE, prompt()))} == {near}
        catalogue.rebind(near, None, is_stored=True)
        catalogue.rebind(far, None)
        assert {match.donor_id for match in catalogue.find(DonorQuery(NAMESPACE, prompt()))} == {far}
        assert catalogue.find(DonorQuery(NAMESPACE, prompt(), with_stored=False)) == catalogue.find(
            DonorQuery(NAMESPACE, prompt())
        )
        catalogue.remove(far)
        assert not catalogue.find(DonorQuery(NAMESPACE, prompt(), with_stored=False))

    def test_what_is_not_worth_reading_is_taken_from_a_shorter_donor_at_hand(self):
        """The far donor has all of the text, the near one a part of it that the far one's match hides."""
        catalogue = DonorCatalogue(4096)
        far = catalogue.add(NAMESPACE, TEXT, None, is_stored=True).donor.donor_id
        near = catalogue.add(NAMESPACE, TEXT[20:180], None).donor.donor_id
        lookup = make_lookup(catalogue)
        planned = lookup.find(NAMESPACE, prompt(), 0, FREE, read_cost=self.costs_of(far, 10.0)).planned
        assert [(s.donor_id, s.length) for s in planned.spans] == [(far, 200)]
        planned = lookup.find(NAMESPACE, prompt(), 0, FREE, read_cost=self.costs_of(far, 1000.0)).planned
        assert [(s.donor_id, s.length) for s in planned.spans] == [(near, 160)]

    def test_what_is_at_hand_is_not_read_for_a_few_tokens_more(self):
        """Both pay; the far donor's match has all of the text and hides the near one's."""
        catalogue = DonorCatalogue(4096)
        far = catalogue.add(NAMESPACE, TEXT, None, is_stored=True).donor.donor_id
        near = catalogue.add(NAMESPACE, TEXT[:180], None).donor.donor_id
        lookup = make_lookup(catalogue)
        for cost, expected in ((19.0, (far, 200)), (21.0, (near, 180))):
            planned = lookup.find(NAMESPACE, prompt(), 0, FREE, read_cost=self.costs_of(far, cost)).planned
            assert [(s.donor_id, s.length) for s in planned.spans] == [expected]

    def test_resident_text_is_filled_from_stores(self):
        """Reading costs by the token: what the resident donor leaves out is read and nothing else."""
        catalogue = DonorCatalogue(4096)
        far = catalogue.add(NAMESPACE, TEXT, None, is_stored=True).donor.donor_id
        near = catalogue.add(NAMESPACE, TEXT[50:170], None).donor.donor_id
        lookup = make_lookup(catalogue)
        read_cost = lambda match: match.length / 2 if match.donor_id == far else 0.0  # noqa: E731
        planned = lookup.find(NAMESPACE, prompt(), 0, FREE, read_cost=read_cost).planned
        spans = [(span.donor_id, span.target_start, span.donor_start, span.length) for span in planned.spans]
        assert spans == [(far, 50, 0, 50), (near, 100, 0, 120), (far, 220, 170, 30)]

    def test_a_gap_that_is_shorter_than_the_shortest_run_is_not_read(self):
        catalogue = DonorCatalogue(4096)
        far = catalogue.add(NAMESPACE, TEXT, None, is_stored=True).donor.donor_id
        near = catalogue.add(NAMESPACE, TEXT[15:185], None).donor.donor_id
        lookup = make_lookup(catalogue)
        read_cost = lambda match: match.length / 2 if match.donor_id == far else 0.0  # noqa: E731
        planned = lookup.find(NAMESPACE, prompt(), 0, FREE, read_cost=read_cost).planned
        assert [(span.donor_id, span.length) for span in planned.spans] == [(near, 170)]

    def test_far_donors_alone_are_a_miss_where_reading_costs_more(self):
        catalogue = DonorCatalogue(4096)
        far = catalogue.add(NAMESPACE, TEXT, None, is_stored=True).donor.donor_id
        lookup = make_lookup(catalogue)
        found = lookup.find(NAMESPACE, prompt(), 0, FREE, read_cost=self.costs_of(far, 1000.0))
        assert found.planned.reason is MissReason.NOT_WORTH_IT
