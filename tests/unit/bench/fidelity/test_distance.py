"""Classes of distance of reused text."""

from __future__ import annotations

import pytest

from kvgraft.bench.fidelity.distance import EDITED, FAR, NEAR, OWN, REORDERED, distance_class
from kvgraft.types import Fidelity, SpanReport


def span(start, length, donor_start, donor=1):
    return SpanReport(start, length, donor, donor_start, start - donor_start, Fidelity.SHIFTED, 0)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([span(100, 50, 100)], OWN),
        ([span(100, 50, 355)], NEAR),
        ([span(100, 50, 356)], FAR),
        ([span(100, 50, 400), span(300, 90, 100)], REORDERED),
        ([span(100, 50, 400), span(300, 90, 100, donor=2)], NEAR),
        ([span(0, 50, 0), span(53, 90, 53)], EDITED),
        ([span(0, 50, 0), span(50, 90, 60)], EDITED),
        ([span(0, 50, 0), span(50, 90, 50)], OWN),
        ([span(0, 50, 0), span(150, 90, 150)], OWN),
        ([span(0, 50, 0), span(300, 40, 10)], OWN),
        ([], None),
    ],
    ids=[
        "own",
        "near",
        "far",
        "reordered",
        "other donor",
        "replaced",
        "removed",
        "adjacent",
        "new text",
        "most",
        "none",
    ],
)
def test_class(spans, expected):
    assert distance_class(spans) == expected
    assert distance_class(spans[::-1]) == expected


def test_an_edit_behind_the_exact_prefix():
    assert distance_class([span(53, 90, 51)], prefix_len=50) == EDITED
    assert distance_class([span(53, 90, 153)], prefix_len=50) == NEAR
    assert distance_class([span(53, 90, 51)]) == NEAR
