"""Refresh: whoever begins as others that reused text approximately is computed in full, after as many as was said."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft.donors import CostModel, DonorCatalogue
from kvgraft.donors.front import front_digest
from kvgraft.reuse import Lookup, refresh
from kvgraft.reuse.refresh import Refresh
from kvgraft.types import GraftPlan, Match, Miss, MissReason, Namespace

NAMESPACE = Namespace("model")
OTHER_TENANT = Namespace("model", tenant_salt="other")
FREE = CostModel(attention_per_key=0, copy_per_token=0, per_span=0, recompute_ratio=0)
DOCUMENT = np.arange(1000, 1200)
INSTRUCTION = np.arange(50)


def prompt(*texts):
    return np.concatenate(texts)


def question(number):
    return np.arange(5000 + 100 * number, 5040 + 100 * number)


def plan_of(num_tokens, *spans, prefix_len=0):
    matches = [Match(start, 7, start, stop - start, is_exact=is_exact) for start, stop, is_exact in spans]
    return GraftPlan.over(num_tokens, prefix_len, matches)


def revised(rule, tokens, *spans, namespace=NAMESPACE):
    return rule.revised(namespace, tokens, plan_of(len(tokens), *spans))


def is_refreshed(planned):
    return isinstance(planned, Miss) and planned.reason is MissReason.REFRESHED


def test_the_third_question_about_a_moved_document_is_computed_in_full():
    rule = Refresh(2)
    asked = [prompt(INSTRUCTION, DOCUMENT, question(i)) for i in range(4)]
    answers = [is_refreshed(revised(rule, tokens, (50, 250, False))) for tokens in asked]
    assert answers == [False, False, True, False], "behind it counting begins again"


def test_turns_of_a_conversation_count_although_each_reuses_further():
    rule = Refresh(2)
    text = prompt(INSTRUCTION, DOCUMENT, *(question(i) for i in range(4)))
    first = revised(rule, text[:290], (50, 250, False))
    second = revised(rule, text[:330], (50, 250, False), (250, 290, False))
    third = revised(rule, text[:370], (50, 250, False), (250, 330, False))
    assert [is_refreshed(planned) for planned in (first, second, third)] == [False, False, True]
    assert "2 prompts with the same beginning" in third.detail


def test_a_lookup_that_is_repeated_counts_once_and_has_the_same_answer():
    rule = Refresh(2)
    asked = [prompt(INSTRUCTION, DOCUMENT, question(i)) for i in range(3)]
    answers = [[is_refreshed(revised(rule, tokens, (50, 250, False))) for _ in range(5)] for tokens in asked]
    assert answers == [[False] * 5, [False] * 5, [True] * 5]


def test_of_those_that_are_asked_at_once_one_is_computed_in_full():
    rule = Refresh(2)
    answers = [
        is_refreshed(revised(rule, prompt(INSTRUCTION, DOCUMENT, question(i)), (50, 250, False))) for i in range(9)
    ]
    assert answers == [False, False, True] * 3


@pytest.mark.parametrize(
    "tokens",
    [
        prompt(np.arange(900, 950), DOCUMENT, question(2)),
        prompt(INSTRUCTION, DOCUMENT[::-1], question(2)),
    ],
    ids=["another instruction", "another document"],
)
def test_what_begins_otherwise_does_not_count(tokens):
    rule = Refresh(2)
    for i in range(2):
        revised(rule, prompt(INSTRUCTION, DOCUMENT, question(i)), (50, 250, False))
    assert isinstance(revised(rule, tokens, (50, 250, False)), GraftPlan)


def test_another_tenant_does_not_count():
    rule = Refresh(1)
    revised(rule, prompt(INSTRUCTION, DOCUMENT, question(0)), (50, 250, False))
    again = prompt(INSTRUCTION, DOCUMENT, question(1))
    assert isinstance(revised(rule, again, (50, 250, False), namespace=OTHER_TENANT), GraftPlan)
    assert is_refreshed(revised(rule, again, (50, 250, False)))


def test_exact_spans_stay():
    rule = Refresh(1)
    spans = (0, 50, True), (50, 250, False)
    assert len(revised(rule, prompt(INSTRUCTION, DOCUMENT, question(0)), *spans).spans) == 2
    planned = revised(rule, prompt(INSTRUCTION, DOCUMENT, question(1)), *spans)
    assert [(span.target_start, span.length, span.is_exact) for span in planned.spans] == [(0, 50, True)]
    assert not planned.is_approximate
    assert planned.compute.tolist() == list(range(50, 290))


def test_behind_a_common_beginning_more_text_is_still_reused():
    """The document that all prompts share is computed in full, another one behind it is not."""
    rule = Refresh(2)
    others = [np.arange(20_000 + 1000 * i, 20_300 + 1000 * i) for i in range(3)]
    asked = [prompt(INSTRUCTION, DOCUMENT, other, question(0)) for other in others]
    plans = [revised(rule, tokens, (50, 250, False), (250, 550, False)) for tokens in asked]
    assert [[(span.target_start, span.length) for span in planned.spans] for planned in plans] == [
        [(50, 200), (250, 300)],
        [(50, 200), (250, 300)],
        [(250, 300)],
    ]
    assert plans[2].compute[0] == 0


def test_a_plan_without_approximate_spans_is_none_of_its_business():
    rule = Refresh(1)
    tokens = prompt(INSTRUCTION, DOCUMENT, question(0))
    for _ in range(3):
        planned = plan_of(len(tokens), (0, 250, True))
        assert rule.revised(NAMESPACE, tokens, planned) is planned


def test_zero_never_refreshes():
    rule = Refresh(0)
    for i in range(20):
        tokens = prompt(INSTRUCTION, DOCUMENT, question(i))
        assert isinstance(revised(rule, tokens, (50, 250, False)), GraftPlan)


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(refresh, "_REMEMBERED", 8)
    rule = Refresh(2)
    for i in range(100):
        revised(rule, prompt(np.arange(i, i + 50), DOCUMENT, question(i)), (50, 250, False))
    assert len(rule._paid) == len(rule._answers) == 8


@given(
    after=st.integers(1, 3),
    asked=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), max_size=40),
)
def test_no_beginning_is_reused_approximately_more_often_than_was_said(after, asked):
    """Questions about three documents, in any order, some of them again: at most `after` new ones between two refreshes."""
    rule = Refresh(after)
    answers: dict[tuple[int, int], bool] = {}
    grafted = [0, 0, 0]
    for document, number in asked:
        tokens = prompt(np.arange(document, document + 50), DOCUMENT, question(number))
        refreshed = is_refreshed(revised(rule, tokens, (50, 250, False)))
        if (document, number) in answers:
            assert refreshed == answers[document, number]
            continue
        answers[document, number] = refreshed
        assert refreshed == (grafted[document] == after)
        grafted[document] = 0 if refreshed else grafted[document] + 1


class TestLookup:
    """The same through the lookup of all engines."""

    @pytest.fixture
    def catalogue(self):
        catalogue = DonorCatalogue(4096)
        catalogue.add(NAMESPACE, DOCUMENT, None)
        return catalogue

    def find(self, lookup, number, **options):
        tokens = prompt(INSTRUCTION, DOCUMENT, question(number))
        return lookup.find(NAMESPACE, tokens, 0, FREE, **options).planned

    def test_matches_are_still_told(self, catalogue):
        lookup = Lookup(catalogue, min_run=16, max_generation=2, refresh_after=1)
        self.find(lookup, 0)
        tokens = prompt(INSTRUCTION, DOCUMENT, question(1))
        found = lookup.find(NAMESPACE, tokens, 0, FREE)
        assert is_refreshed(found.planned)
        assert [(match.target_start, match.length) for match in found.matches] == [(50, 200)]

    def test_who_is_computed_in_full_anyhow_neither_counts_nor_is_refused(self, catalogue):
        lookup = Lookup(catalogue, min_run=16, max_generation=2, refresh_after=1)
        for number in range(3):
            assert isinstance(self.find(lookup, number, may_refresh=False), GraftPlan)
        assert isinstance(self.find(lookup, 3), GraftPlan)
        assert is_refreshed(self.find(lookup, 4))

    def test_where_all_donors_have_gone_nobody_has_reused_anything(self, catalogue):
        lookup = Lookup(catalogue, min_run=16, max_generation=2, refresh_after=1)
        assert isinstance(self.find(lookup, 0), GraftPlan)
        (donor,) = list(catalogue)
        catalogue.remove(donor.donor_id)
        assert self.find(lookup, 1).reason is MissReason.NO_DONORS
        catalogue.add(NAMESPACE, DOCUMENT, None)
        assert isinstance(self.find(lookup, 2), GraftPlan)

    def test_text_that_donors_have_exactly_in_front_is_reused(self, catalogue):
        catalogue.add(NAMESPACE, INSTRUCTION, None)
        lookup = Lookup(catalogue, min_run=16, max_generation=2, refresh_after=1)
        self.find(lookup, 0)
        planned = self.find(lookup, 1)
        assert [(span.target_start, span.length, span.is_exact) for span in planned.spans] == [(0, 50, True)]


class TestLineagesEnd:
    """Text of the last generation is reused while more is saved than what nobody may have that is computed behind it."""

    def catalogue(self, generation):
        catalogue = DonorCatalogue(4096)
        catalogue.add(NAMESPACE, DOCUMENT, None)
        tail = np.arange(2000, 2060)
        catalogue.add(
            NAMESPACE, tail, None, generation=generation, start_position=400, front=front_digest(b"", DOCUMENT)
        )
        return catalogue, tail

    def plan(self, generation, num_new, *, max_generation=2):
        catalogue, tail = self.catalogue(generation)
        lookup = Lookup(catalogue, min_run=16, max_generation=max_generation)
        tokens = prompt(INSTRUCTION, DOCUMENT, tail, np.arange(9000, 9000 + num_new))
        planned = lookup.find(NAMESPACE, tokens, 0, FREE).planned
        return [(span.target_start, span.length, span.generation) for span in planned.spans]

    def test_little_is_lost_behind_much(self):
        assert self.plan(2, 59) == [(50, 200, 0), (250, 60, 2)]

    def test_as_much_is_lost_as_is_reused(self):
        assert self.plan(2, 60) == [(50, 200, 0)]

    def test_what_is_computed_behind_it_may_still_be_a_donor(self):
        assert self.plan(1, 500) == [(50, 200, 0), (250, 60, 1)]

    def test_text_that_was_read_exactly_is_reused_though_nothing_may_be_handed_on(self):
        assert self.plan(0, 500, max_generation=0) == [(50, 200, 0), (250, 60, 0)]


class TestTurnsToCome:
    """In a conversation, a prompt of which half and more is an exact prefix, small grafts are not made."""

    COSTS = CostModel(attention_per_key=0, copy_per_token=0, per_span=0, recompute_ratio=0.1, query_rows=50)

    @pytest.mark.parametrize(
        ("prefix_len", "refresh_after", "is_made"), [(700, 2, False), (699, 2, True), (700, 0, True), (0, 2, True)]
    )
    def test_half_of_it_is_an_exact_prefix(self, prefix_len, refresh_after, is_made):
        catalogue = DonorCatalogue(4096)
        catalogue.add(NAMESPACE, DOCUMENT, None)
        lookup = Lookup(catalogue, min_run=16, max_generation=2, refresh_after=refresh_after)
        tokens = prompt(np.arange(20_000, 21_000), DOCUMENT, np.arange(30_000, 30_200))
        planned = lookup.find(NAMESPACE, tokens, prefix_len, self.COSTS).planned
        assert isinstance(planned, GraftPlan) == is_made
