"""Which match is exact: a donor's K/V that a full prefill of the prompt would have given, and nothing else."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft.donors import DonorCatalogue, DonorQuery
from kvgraft.donors.front import Fronts, front_digest
from kvgraft.errors import ConfigError
from kvgraft.types import Fidelity, Match, Namespace

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
    return catalogue, catalogue.find(DonorQuery(NAMESPACE, prompt, start=start, **options))


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
    far, near = (catalogue.add(NAMESPACE, text(200), None, is_stored=far).donor.donor_id for far in (True, False))
    assert catalogue.find(DonorQuery(NAMESPACE, text(200))) == [Match(0, near, 0, 200, fidelity=Fidelity.EXACT)]
    catalogue.remove(near)
    assert catalogue.find(DonorQuery(NAMESPACE, text(200))) == [Match(0, far, 0, 200, fidelity=Fidelity.EXACT)]


def test_a_part_of_a_match_is_as_exact_as_the_whole():
    match = Match(10, 3, 110, 100, fidelity=Fidelity.EXACT)
    assert match.part(40, 60) == Match(40, 3, 140, 20, fidelity=Fidelity.EXACT)
    assert match.part(0, 1_000) == match


def behind(front, tokens, *, told=True, namespace=NAMESPACE):
    """A catalogue with one donor that was computed exactly behind `front`."""
    catalogue = DonorCatalogue(100_000)
    digest = front_digest(namespace.key, front) if told else b""
    catalogue.add(NAMESPACE, tokens, None, start_position=len(front), front=digest)
    return catalogue


def test_what_stood_behind_the_same_text_is_exact():
    front, tail = text(50, 1), text(300)
    prompt = joined(front, tail, text(40, 2))
    assert spans(behind(front, tail).find(DonorQuery(NAMESPACE, prompt))) == [(50, 350, True)]
    assert spans(behind(front, tail).find(DonorQuery(NAMESPACE, prompt, start=120))) == [(120, 350, True)]
    assert spans(behind(front, joined(tail[:100], text(9, 3), tail[100:])).find(DonorQuery(NAMESPACE, prompt))) == [
        (50, 150, True),
        (150, 350, False),
    ]


@pytest.mark.parametrize("place", [0, 49])
def test_one_other_token_in_front_makes_it_approximate(place):
    front, tail = text(50, 1), text(300)
    other = front.copy()
    other[place] += 1
    assert spans(behind(front, tail).find(DonorQuery(NAMESPACE, joined(other, tail)))) == [(50, 350, False)]
    assert spans(behind(front, tail).find(DonorQuery(NAMESPACE, joined(front[:-1], tail)))) == [(49, 349, False)]
    assert spans(behind(front, tail, told=False).find(DonorQuery(NAMESPACE, joined(front, tail)))) == [(50, 350, False)]


def test_digest_of_another_namespace_says_nothing():
    front, tail = text(50, 1), text(300)
    foreign = behind(front, tail, namespace=Namespace("model", tenant_salt="another"))
    assert spans(foreign.find(DonorQuery(NAMESPACE, joined(front, tail)))) == [(50, 350, False)]


def test_a_conversation_is_exact_turn_by_turn():
    turns = [text(200, seed) for seed in range(3)]
    catalogue = DonorCatalogue(100_000)
    for number, turn in enumerate(turns):
        front = joined(*turns[:number]) if number else turn[:0]
        catalogue.add(NAMESPACE, turn, None, start_position=200 * number, front=front_digest(NAMESPACE.key, front))
    assert spans(catalogue.find(DonorQuery(NAMESPACE, joined(*turns, text(60, 9))))) == [
        (n, n + 200, True) for n in (0, 200, 400)
    ]
    moved = joined(turns[0], text(30, 9), *turns[1:])
    assert spans(catalogue.find(DonorQuery(NAMESPACE, moved))) == [(0, 200, True), (230, 430, False), (430, 630, False)]


def test_exact_text_behind_a_gap_leaves_the_gap_to_copies():
    front, tail = joined(text(100, 1), text(80, 2)), text(300)
    catalogue = behind(front, tail)
    catalogue.add(NAMESPACE, text(80, 2), None)
    assert spans(catalogue.find(DonorQuery(NAMESPACE, joined(front, tail)))) == [(100, 180, False), (180, 480, True)]


def test_parts_of_a_donor_know_their_front_as_far_as_the_donor_does():
    first, later = text(100), text(100, 1)
    catalogue = DonorCatalogue(1_000)
    whole = catalogue.add(NAMESPACE, first, None).donor
    tail = catalogue.add(NAMESPACE, later, None, start_position=100, front=front_digest(NAMESPACE.key, first)).donor
    assert whole.front_at(0) == b""
    assert whole.front_at(40) == front_digest(NAMESPACE.key, first[:40])
    assert tail.front_at(0) == tail.front
    assert tail.front_at(1) == b""


def test_digests_of_a_prompt_are_those_of_its_beginnings():
    tokens, fronts = text(200), Fronts(NAMESPACE.key, text(200))
    for stop in (0, 0, 1, 70, 70, 200):
        assert fronts.up_to(stop) == front_digest(NAMESPACE.key, tokens[:stop].astype(np.int32))
    assert len({front_digest(key, tokens) for key in (b"a" * 16, b"b" * 16)}) == 2


def test_a_front_is_a_digest_or_nothing():
    with pytest.raises(ConfigError, match=r"front must have 32 bytes or none, not 3; front_digest\(\) makes one"):
        DonorCatalogue(1_000).add(NAMESPACE, text(20), None, start_position=5, front=b"abc")


PIECES = [text(40, seed) for seed in range(3)]
TURNS = st.lists(st.integers(0, 2), min_size=1, unique=True)


@settings(max_examples=300, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=6),
    donors=st.lists(
        st.tuples(TURNS, st.integers(0, 2), st.sampled_from([0, 0, 0, 1]), st.sampled_from([True, True, False])),
        max_size=6,
    ),
    start=st.integers(0, 150),
)
def test_exact_is_exactly_what_is_proven(prompt, donors, start):
    """Never claimed of other K/V, and claimed wherever a donor has them for more than a seam."""
    tokens = joined(*(PIECES[piece] for piece in prompt))
    catalogue, whole, proved = DonorCatalogue(100_000), {}, []
    for turns, num_front, generation, is_told in donors:
        text_of_donor = joined(*(PIECES[piece] for piece in turns))
        begin = 40 * min(num_front, len(turns) - 1)
        front = front_digest(NAMESPACE.key, text_of_donor[:begin]) if is_told else b""
        donor = catalogue.add(
            NAMESPACE, text_of_donor[begin:], None, generation=generation, start_position=begin, front=front
        ).donor
        whole[donor.donor_id] = text_of_donor
        length = min(len(text_of_donor), len(tokens))
        differs = np.flatnonzero(text_of_donor[:length] != tokens[:length])
        end = int(differs[0]) if len(differs) else length
        if generation == 0 and (is_told or not begin) and end > begin:
            proved.append((max(start, begin), end))
    matches = catalogue.find(DonorQuery(NAMESPACE, tokens, start=start))
    is_exact = np.zeros(len(tokens), np.bool_)
    for match in matches:
        donor = catalogue.get(match.donor_id)
        own = donor.token_ids[match.donor_start : match.donor_start + match.length]
        assert np.array_equal(own, tokens[match.target_start : match.target_end])
        assert match.length >= MIN_RUN
        if match.is_exact:
            assert donor.generation == 0
            assert np.array_equal(whole[match.donor_id][: match.target_end], tokens[: match.target_end])
            assert match.target_start == donor.start_position + match.donor_start >= start
            is_exact[match.target_start : match.target_end] = True
    for first, last in proved:
        if len(donors) <= 2 and last - first >= 2 * MIN_RUN:  # of more with one text the index names the newest
            assert int((~is_exact[first:last]).sum()) <= 2 * MIN_RUN
    assert all(a.target_end <= b.target_start for a, b in pairwise(matches))
