"""A small allocation that fails anywhere in the backend's books costs donors, never SGLang's scheduler or an answer."""

from __future__ import annotations

import os

import pytest
from tests.support.failing_calls import drawn, points_at
from tests.support.sglang_drill import KINDS, Drill

_FEW = int(os.environ.get("DRILL_POINTS", "25"))
"""Points of one kind of scheduler in the slow test; there are some 2,500 of each kind."""

_HALF = "/integrations/sglang/"
KNOWN = [
    ("DonorKeeper.digest", f"{_HALF}requests/promises.py", "outside of every try"),
    ("Ranks.chosen", f"{_HALF}requests/promises.py", "nothing is agreed on"),
    ("Promises._decide_together", f"{_HALF}requests/promises.py", "a request is half matched"),
    ("SGLangRequest.num_drawn", f"{_HALF}requests/promises.py", "a request is half matched"),
    ("SGLangRequest.goes_on", f"{_HALF}requests/loading.py", "a chunk cannot be begun"),
    ("SGLangRequest.loaded", f"{_HALF}donors/loader.py", "slots are nobody's"),
    ("DonorKeeper.record_hit", f"{_HALF}donors/loader.py", "slots are nobody's"),
    ("DonorKeeper.capture", f"{_HALF}requests/publishing.py", "slots have another text than is noted"),
    ("SlotTexts.forget", f"{_HALF}donors/keeper.py", "slots have another text than is noted"),
    ("DonorKeeper._verify", f"{_HALF}donors/keeper.py", "a donor is longer than what is left of it"),
    ("Continuations.note", f"{_HALF}donors/request_texts.py", "the tree has what nobody knows"),
    ("RequestLog.finished", f"{_HALF}requests/ends.py", "a row is released and its request is not"),
    ("Lineage.has_copies", "/reuse/report.py", "a report cannot be made"),
    ("MatchFinder.insert", "/donors/catalogue.py", "a donor is half known"),
    ("DonorQueue.discard", "/donors/catalogue.py", "a donor leaves and is counted"),
]


@pytest.fixture(scope="module")
def plain():
    return Drill("plain")


@pytest.fixture(scope="module")
def places(plain):
    return plain.places()


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["one of its calls", "another"])
@pytest.mark.parametrize(("callee", "caller", "what"), KNOWN, ids=[callee for callee, *_ in KNOWN])
def test_a_call_that_fails_leaves_sound_books(plain, places, callee, caller, what, which):  # noqa: PLR0917
    for place, number in points_at(places, callee, caller)[which : which + 1]:
        assert not plain.failures(place, number), (place, number, what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_leaves_sound_books(kind):
    drill = Drill(kind)
    found = {point: wrong for point in drawn(drill.places(), _FEW) if (wrong := drill.failures(*point))}
    assert not found
