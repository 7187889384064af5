"""Tiling: as much of the union as any choice of pieces covers, few pieces, stated preferences."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from kvgraft.donors.cover import cover, undominated
from kvgraft.donors.runs import Runs
from kvgraft.donors.tiling import tile

MIN_RUN = 16


def make_runs(*intervals, rows=None, diagonals=None):
    starts, ends = np.array(intervals, np.int64).reshape(-1, 2).T
    zeros = np.zeros(len(starts), np.int64)
    rows = np.arange(len(starts)) if rows is None else np.array(rows)
    return Runs(starts, ends, zeros if diagonals is None else np.array(diagonals), rows)


def tiled(runs, generations=None, min_run=MIN_RUN):
    generations = np.zeros(runs.num_runs, np.int64) if generations is None else np.array(generations)
    return list(zip(*(column.tolist() for column in tile(runs, generations, min_run=min_run)), strict=True))


def intervals_of(pieces):
    return [(start, end) for start, end, _, _ in pieces]


def best_coverage(intervals, min_run):
    """Most tokens that disjoint pieces of runs can cover, by trying every end of every piece."""
    last = max(end for _, end in intervals)

    @cache
    def best(position):
        if position <= 0:
            return 0
        options = [best(position - 1)]
        for start, end in intervals:
            if start + min_run <= position <= end:
                options += [best(begin) + position - begin for begin in range(start, position - min_run + 1)]
        return max(options)

    return max(best(position) for position in range(last + 1))


def test_no_runs_give_no_pieces():
    assert tiled(Runs.empty()) == []


def test_disjoint_runs_stay_as_they_are():
    assert intervals_of(tiled(make_runs((50, 90), (0, 20)))) == [(0, 20), (50, 90)]


def test_contained_run_is_dropped():
    assert tiled(make_runs((10, 30), (0, 40))) == [(0, 40, 0, 1)]


def test_overlap_goes_to_the_first():
    assert intervals_of(tiled(make_runs((0, 60), (40, 100)))) == [(0, 60), (60, 100)]


def test_farthest_reaching_run_is_preferred_over_steps_between():
    assert intervals_of(tiled(make_runs((0, 60), (20, 70), (50, 120), (65, 140)))) == [(0, 60), (60, 120), (120, 140)]
    assert intervals_of(tiled(make_runs((0, 60), (20, 70), (59, 140), (50, 120)))) == [(0, 60), (60, 140)]


def test_short_rest_takes_tokens_from_its_neighbour():
    assert intervals_of(tiled(make_runs((0, 60), (40, 66)))) == [(0, 50), (50, 66)]


def test_short_rest_pushes_a_neighbour_that_has_none_to_spare():
    pieces = intervals_of(tiled(make_runs((0, 40), (20, 56), (41, 60))))
    assert pieces == [(0, 28), (28, 44), (44, 60)]


def test_short_rest_takes_a_little_from_several():
    pieces = intervals_of(tiled(make_runs((0, 27), (3, 55), (31, 56))))
    assert pieces == [(0, 24), (24, 40), (40, 56)]


def test_short_rest_replaces_what_cannot_give_and_covers_less():
    assert intervals_of(tiled(make_runs((0, 16), (4, 30)))) == [(4, 30)]


def test_short_rest_is_left_out_where_nothing_can_give():
    assert intervals_of(tiled(make_runs((0, 20), (10, 27)))) == [(0, 20)]


def test_equal_runs_lower_generation_wins():
    assert tiled(make_runs((0, 40), (0, 40)), [2, 1]) == [(0, 40, 0, 1)]


def test_equal_runs_donor_with_more_in_common_wins():
    assert tiled(make_runs((0, 40), (0, 40), (60, 90), rows=[1, 2, 2]))[0] == (0, 40, 0, 2)


def test_equal_runs_neighbour_wins_over_generation():
    runs = make_runs((0, 40), (41, 80), (41, 80), (41, 80), rows=[7, 3, 7, 7], diagonals=[5, 5, 9, 5])
    assert tiled(runs, [1, 0, 1, 1]) == [(0, 40, 5, 7), (41, 80, 5, 7)]


def test_any_number_of_runs_is_tiled():
    starts = np.arange(0, 20_000, 2)
    runs = Runs(starts, starts + 100, starts * 0, starts % 7)
    pieces = intervals_of(tiled(runs))
    assert (pieces[0][0], pieces[-1][1]) == (0, 20_098)
    assert all(left[1] == right[0] for left, right in pairwise(pieces))
    assert len(pieces) <= 206


@pytest.mark.parametrize("seed", range(60))
def test_tiling_covers_what_the_best_choice_covers(seed):
    rng = np.random.default_rng(seed)
    min_run = int(rng.integers(2, 9))
    starts = rng.integers(0, 60, int(rng.integers(1, 9)))
    intervals = [(int(s), int(s + rng.integers(min_run, 4 * min_run))) for s in starts]
    pieces = tiled(make_runs(*intervals), min_run=min_run)
    for start, end, _, row in pieces:
        assert intervals[row][0] <= start < end <= intervals[row][1]
        assert end - start >= min_run
    assert all(left[1] <= right[0] for left, right in pairwise(pieces))
    covered = sum(end - start for start, end, _, _ in pieces)
    assert covered == best_coverage(intervals, min_run)


def test_hard_stretch_is_cut_in_the_best_way_where_taking_turns_is_not():
    runs = make_runs((14, 64), (43, 98), (75, 119), (103, 136))
    assert sum(end - start for start, end, *_ in tiled(runs, min_run=32)) == 117


def test_long_hard_stretch_is_cut_in_time_and_nearly_as_well():
    starts = np.arange(0, 30_000, 29)
    runs = Runs(starts, starts + 40, starts * 0, starts % 7)
    pieces = tiled(runs, min_run=32)
    assert all(left[1] <= right[0] for left, right in pairwise(pieces))
    assert sum(end - start for start, end, *_ in pieces) > 0.75 * 30_000


@pytest.mark.parametrize("seed", range(10))
def test_cover_has_the_same_union_as_all(seed):
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, 100, 30)
    ends = starts + rng.integers(1, 30, 30)
    chosen = cover(starts, ends)
    union = {t for s, e in zip(starts, ends, strict=True) for t in range(s, e)}
    assert {t for i in chosen for t in range(starts[i], ends[i])} == union
    assert len(set(chosen.tolist())) == len(chosen)
    kept = undominated(starts, ends)
    assert (np.diff(starts[kept]) >= 0).all()
    assert (np.diff(ends[kept]) >= 0).all()
    for start, end in zip(starts, ends, strict=True):
        assert ((starts[kept] <= start) & (ends[kept] >= end)).any()
