"""Which match is exact: a donor's K/V that a full prefill of the prompt would have given, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.donors import DonorCatalogue
from kvgraft.types import Match, Namespace

NAMESPACE = Namespace("model")
MIN_RUN = 16


def text(length, seed=0):
    return np.random.default_rng(seed).integers(0, 30_000, length)


def joined(*parts):
    return np.concatenate(parts)


def found(prompt, *donors, start=0, **options):
    """Matches of a prompt, in a catalogue of `(tokens, generation, start_position)`."""
    catalogue = DonorCatalogue(100_000)
    for tokens, generation, position in donors:
        catalogue.add(NAMESPACE, tokens, None, generation=generation, start_position=position)
    return catalogue, catalogue.find(NAMESPACE, prompt, start=start, **options)


def spans(matches):
    return [(match.target_start, match.target_end, match.is_exact) for match in matches]


def test_what_a_prompt_and_an_exact_donor_begin_with_is_exact():
    _, matches = found(joined(text(300), text(50, 1)), (text(400), 0, 0))
    assert spans(matches) == [(0, 300, True)]


@pytest.mark.parametrize(
    ("generation", "position"), [(1, 0), (0, 64)], ids=["attended to copies", "encoded behind other text"]
)
def test_donors_of_another_kind_are_not(generation, position):
    _, matches = found(text(300), (text(300), generation, position))
    assert spans(matches) == [(0, 300, False)]


def test_other_text_in_front_makes_it_approximate():
    prompt = joined(text(40, 1), text(300))
    assert spans(found(prompt, (text(300), 0, 0))[1]) == [(40, 340, False)]
    same_place = joined(text(40, 2), text(300))
    assert spans(found(prompt, (same_place, 0, 0))[1]) == [(40, 340, False)]
    assert spans(found(prompt, (same_place, 0, 0), start=40)[1]) == [(40, 340, False)]


def test_behind_an_exact_prefix_the_text_in_front_of_it_is_compared():
    _, matches = found(text(300), (text(300), 0, 0), start=200)
    assert spans(matches) == [(200, 300, True)]
    one_other = text(300)
    one_other[3] += 1
    assert spans(found(text(300), (one_other, 0, 0), start=200)[1]) == [(200, 300, False)]


def test_exact_text_goes_before_a_longer_copy_as_far_as_it_reaches():
    longer = joined(text(30, 7), text(1_000))
    catalogue, matches = found(text(1_000), (longer, 0, 0), (text(400), 0, 0), (text(200), 0, 0))
    assert spans(matches) == [(0, 400, True), (400, 1_000, False)]
    assert catalogue.get(matches[0].donor_id).num_tokens == 400


def test_what_stands_behind_keeps_the_shortest_length():
    """Nothing is lost to the exact front: it leaves the next piece what that needs."""
    longer = joined(text(30, 7), text(400))
    _, matches = found(text(400), (longer, 0, 0), (text(390), 0, 0))
    assert spans(matches) == [(0, 384, True), (384, 400, False)]


def test_of_equal_exact_donors_the_near_one_is_taken():
    catalogue = DonorCatalogue(10_000)
    far, near = (catalogue.add(NAMESPACE, text(200), None, is_far=far).donor.donor_id for far in (True, False))
    assert catalogue.find(NAMESPACE, text(200)) == [Match(0, near, 0, 200, is_exact=True)]
    catalogue.remove(near)
    assert catalogue.find(NAMESPACE, text(200)) == [Match(0, far, 0, 200, is_exact=True)]


def test_a_part_of_a_match_is_as_exact_as_the_whole():
    match = Match(10, 3, 110, 100, is_exact=True)
    assert match.part(40, 60) == Match(40, 3, 140, 20, is_exact=True)
    assert match.part(0, 1_000) == match


PIECES = [text(24, seed) for seed in range(4)]


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    donors=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, unique=True), st.integers(0, 1), st.sampled_from([0, 0, 24])),
        max_size=5,
    ),
    start=st.integers(0, 100),
)
def test_exact_is_exactly_what_is_proven(prompt, donors, start):
    """Never claimed of another donor, and claimed wherever one that repeats nothing has the prompt's beginning."""
    tokens = joined(*(PIECES[piece] for piece in prompt))
    made = [(joined(*(PIECES[piece] for piece in pieces)), *kind) for pieces, *kind in donors]
    catalogue, matches = found(tokens, *made, start=start)
    plain = sum(match.length for match in matches)
    longest = 0
    for donor in catalogue:
        if donor.generation == donor.start_position == 0:
            length = min(donor.num_tokens, len(tokens))
            differs = np.flatnonzero(donor.token_ids[:length] != tokens[:length])
            longest = max(longest, int(differs[0]) if len(differs) else length)
    for index, match in enumerate(matches):
        donor = catalogue.get(match.donor_id)
        own = donor.token_ids[match.donor_start : match.donor_start + match.length]
        assert np.array_equal(own, tokens[match.target_start : match.target_end])
        if match.is_exact:
            assert (index, match.target_start, donor.generation, donor.start_position) == (0, start, 0, 0)
            assert match.target_end <= longest
    if longest - start >= 2 * MIN_RUN:
        assert matches[0].is_exact
        assert matches[0].target_end >= longest - MIN_RUN
    edges = [(match.target_start, match.target_end) for match in matches]
    assert all(a[1] <= b[0] for a, b in pairwise(edges))
    assert all(match.length >= MIN_RUN for match in matches)
    assert plain == sum(stop - first for first, stop in edges)
