"""Kinds of windows from the definition: which keys a row sees, and what follows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgraft.errors import ConfigError
from kvgraft.windows import ChunkedWindow, SlidingWindow, widest, window_kind

KINDS = [kind(size) for kind in (SlidingWindow, ChunkedWindow) for size in (1, 2, 7, 16)]


def sees(kind, row, key):
    if isinstance(kind, ChunkedWindow):
        return key <= row and key // kind.size == row // kind.size
    return key <= row < key + kind.size


@pytest.mark.parametrize("kind", KINDS)
def test_first_key_is_the_first_that_a_row_sees(kind):
    expected = [next(key for key in range(60) if sees(kind, row, key)) for row in range(60)]
    assert [max(0, kind.first_key(row)) for row in range(60)] == expected
    assert np.maximum(0, kind.first_key(np.arange(60))).tolist() == expected
    assert kind.first_key(torch.arange(60)).clamp(min=0).tolist() == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_prefix_needs_holds_what_all_rows_behind_it_see(kind):
    for num_tokens in range(60):
        seen = [key for row in range(num_tokens, 90) for key in range(num_tokens) if sees(kind, row, key)]
        assert kind.first_needed(num_tokens) <= min(seen, default=num_tokens)
        assert kind.first_needed(num_tokens) <= kind.first_needed(num_tokens + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4])
def test_across_a_boundary_no_row_reads(kind, page_size):
    for stop in range(0, 60, page_size):
        free = [n for n in range(0, stop + 1, page_size) if kind.first_needed(n) == n]
        assert kind.boundary(stop, page_size) == max(free)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_the_frontier_leaves_can_be_matched_again(kind, page_size):
    for num_tokens in range(1, 120):
        frontier, stored = kind.frontier(num_tokens, page_size), num_tokens // page_size * page_size
        assert frontier % page_size == 0
        assert frontier <= kind.first_needed(stored)
        assert frontier <= kind.first_needed(num_tokens)
        assert not stored or frontier <= stored - page_size


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_a_stretch_are_one_band(kind):
    for position in range(40):
        stop = min(kind.stretch_end(position), 60)
        first = max(0, kind.first_key(position))
        assert stop > position
        for row in range(position, stop):
            in_band = [key for key in range(first, row + 1) if kind.band is None or key > row - kind.band]
            assert in_band == [key for key in range(60) if sees(kind, row, key)]


def test_widest_keeps_what_all_layers_read():
    assert widest([None, SlidingWindow(4), SlidingWindow(9)]) == SlidingWindow(9)
    assert widest([ChunkedWindow(4), None, ChunkedWindow(4)]) == ChunkedWindow(4)
    assert widest([None]) is None


@pytest.mark.parametrize("others", [[SlidingWindow(8)], [ChunkedWindow(8)]])
def test_kinds_that_do_not_go_together_are_refused(others):
    with pytest.raises(ConfigError, match=r"chunks of 4 tokens and \w+ of 8 tokens"):
        widest([ChunkedWindow(4), *others])


def test_kind_is_named_by_one_size():
    assert window_kind(5, None) == SlidingWindow(5)
    assert window_kind(None, 5) == ChunkedWindow(5)
