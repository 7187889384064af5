"""Matches become regions that SGLang can load: behind the prefix, heads computed, whole pages."""

from __future__ import annotations

import pytest

from kvgraft.graft.select import selection_policy
from kvgraft.integrations.sglang.donors.ranges import subtract
from kvgraft.integrations.sglang.planning.regions import cut, loadable
from kvgraft.types import DonorId, Match

NONE, FIRST_8 = selection_policy("none"), selection_policy("first_k", k=8)


def regions(*matches, start=0, end=1000, page_size=1, policy=NONE, min_run=16):
    return loadable(list(matches), start=start, end=end, page_size=page_size, policy=policy, min_run=min_run)


def test_nothing_is_cut_off_where_nothing_must_be():
    assert regions(Match(10, 7, 3, 50), Match(60, 8, 0, 20)) == (
        [Match(10, 7, 3, 50), Match(60, 8, 0, 20)],
        {10: 0, 60: 0},
    )


def test_prefix_and_end_are_cut_off():
    assert regions(Match(10, 7, 3, 50), start=20, end=45) == ([Match(20, 7, 13, 25)], {20: 0})
    assert regions(Match(10, 7, 3, 50), start=60) == ([], {})


def test_first_k_leaves_the_head_of_every_run_to_compute():
    kept, recomputed = regions(Match(10, 7, 3, 50), Match(60, 8, 0, 30), policy=FIRST_8)
    assert kept == [Match(18, 7, 11, 42), Match(68, 8, 8, 22)]
    assert recomputed == {18: 8, 68: 8}


def test_run_that_first_k_leaves_too_little_of_is_dropped():
    assert regions(Match(10, 7, 3, 20), policy=FIRST_8)[0] == []


@pytest.mark.parametrize(
    ("page_size", "expected"), [(4, Match(12, DonorId(7), 5, 48)), (16, Match(16, DonorId(7), 9, 32)), (32, None)]
)
def test_regions_are_whole_pages_of_the_prompt(page_size, expected):
    assert regions(Match(10, 7, 3, 51), page_size=page_size)[0] == ([] if expected is None else [expected])


def test_cut_keeps_prompt_and_donor_aligned():
    part = cut(Match(10, 7, 3, 50), 15, 20)
    assert part == Match(15, 7, 8, 5)
    assert cut(Match(10, 7, 3, 50), 60, 70) is None


@pytest.mark.parametrize(
    ("ranges", "removed", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(2, 4), (6, 10)], [(0, 2), (4, 6)]),
        ([(0, 10), (20, 30)], [(5, 25)], [(0, 5), (25, 30)]),
        ([(0, 10)], [(0, 10)], []),
        ([(5, 10)], [(0, 5), (10, 12)], [(5, 10)]),
    ],
)
def test_ranges_without_others(ranges, removed, left):
    assert subtract(ranges, removed) == left
