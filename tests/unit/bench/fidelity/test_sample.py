"""Halves that share no document, samples by seed, and donors that were there before."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from kvgraft.bench.fidelity.request import FidelityRequest, Part
from kvgraft.bench.fidelity.sample import BLOCK_REQUESTS, blocks, draw
from kvgraft.bench.fidelity.split import split


def request(rid, *keys, donor=None):
    parts = (Part(f"head {rid}"), *(Part(f"text of {key}", key) for key in keys))
    return FidelityRequest(str(rid), parts, keys, "group", (), donor=donor)


def everything_fits(_prompt):
    return True


class TestSplit:
    def of(self, requests):
        return split(requests, "dev"), split(requests, "test")

    def documents(self, requests):
        return {key for one in requests for key in one.keys}

    def test_small_components_stay_whole_and_halves_are_alike(self):
        requests = [request(f"{pair} {n}", f"a{pair}", f"b{pair}") for pair in range(20) for n in range(2)]
        dev, test = self.of(requests)
        assert (len(dev), len(test)) == (20, 20)
        assert not self.documents(dev) & self.documents(test)

    def test_one_library_is_cut_and_what_straddles_is_dropped(self):
        requests = [request(n, f"d{n}", f"d{n + 1}", f"d{n + 2}") for n in range(60)]
        dev, test = self.of(requests)
        assert not self.documents(dev) & self.documents(test)
        assert min(len(dev), len(test)) > 15
        assert len(dev) + len(test) < 60

    def test_order_of_the_file_does_not_matter(self):
        requests = [request(n, f"d{n % 13}", f"d{n % 7}") for n in range(40)]
        shuffled = random.Random(1).sample(requests, 40)
        assert {one.rid for one in split(shuffled, "dev")} == {one.rid for one in split(requests, "dev")}

    def test_all_is_everything(self):
        requests = [request(n, "one") for n in range(3)]
        assert split(requests, "all") == requests


class TestDraw:
    def test_same_seed_same_sample_and_long_ones_are_counted(self):
        requests = [request(n, f"d{n}") for n in range(50)]
        is_short = {one.prompt for one in requests[::2]}.__contains__
        first = draw(requests, 10, is_short, seed=3)
        assert first == draw(requests, 10, is_short, seed=3)
        assert first.indices != draw(requests, 10, is_short, seed=4).indices
        assert list(first.indices) == sorted(first.indices)
        assert {index % 2 for index in first.indices} == {0}
        assert first.too_long > 0
        assert len(draw(requests, 99, is_short, seed=0).indices) == 25


class TestBlocks:
    def test_donors_are_the_latest_earlier_requests_with_the_documents(self):
        requests = [request(0, "a", "b"), request(1, "a"), request(2, "c"), request(3, "a", "b"), request(4, "a", "z")]
        ((step,),) = blocks(requests, [3], everything_fits)
        assert step.donors == (requests[0].prompt, requests[1].prompt)
        assert not step.is_read
        ((first, second),) = blocks(requests, [3, 4], everything_fits)
        assert first.is_read
        assert second.donors == ()  # "a" was read with the first, "z" has never been

    def test_a_request_is_no_donor_of_itself_nor_a_later_one(self):
        requests = [request(0, "a"), request(1, "a")]
        ((step,),) = blocks(requests, [0], everything_fits)
        assert step.donors == ()

    def test_donors_that_are_too_long_are_passed_over(self):
        requests = [request(0, "a"), request(1, "a"), request(2, "a")]
        ((step,),) = blocks(requests, [2], lambda prompt: prompt != requests[1].prompt)
        assert step.donors == (requests[0].prompt,)

    def test_blocks_begin_anew(self):
        requests = [request(n, "a") for n in range(BLOCK_REQUESTS + 1)]
        first, second = blocks(requests, list(range(BLOCK_REQUESTS + 1)), everything_fits)
        assert [len(first), len(second)] == [BLOCK_REQUESTS, 1]
        assert second[0].donors == (requests[BLOCK_REQUESTS - 1].prompt,)

    def test_a_pair_stands_alone_behind_the_other_text(self):
        requests = [request(n, "same", donor=("the other", "question")) for n in range(2)]
        found = blocks(requests, [0, 1], everything_fits)
        assert [[step.donors for step in block] for block in found] == [[("the other\n\nquestion",)]] * 2


def test_scrambled_prompts_keep_words_and_lose_runs():
    text = " ".join(f"w{n}" for n in range(200))
    one = FidelityRequest("0", (Part("Answer."), Part(text, "d"), Part("Question?")), ("d",), "g", ())
    found = one.scrambled(random.Random(0)).split("\n\n")
    assert (found[0], found[2]) == ("Answer.", "Question?")
    assert sorted(found[1].split()) == sorted(text.split())
    words = found[1].split()
    assert sum(int(b[1:]) == int(a[1:]) + 1 for a, b in pairwise(words)) < 10


@pytest.mark.parametrize("side", ["dev", "test"])
def test_no_requests_no_halves(side):
    assert split([], side) == []
