"""A small allocation that fails anywhere ends requests, never the engine; what is exact stays exact."""

from __future__ import annotations

import os

import pytest
from tests.support.failing_calls import drawn, points_at
from tests.support.memory_drill import KINDS, Drill

_FEW = int(os.environ.get("DRILL_POINTS", "25"))
"""Points of one kind of engine in the slow test; a point takes a second or two, and there are some 4,000 of each kind."""

KNOWN = [
    ("Engine._forget", "/engine/core.py", "a request that ends is forgotten in steps"),
    ("FairQueue.pop", "/engine/schedule/scheduler.py", "a request is admitted, and waits still"),
    ("FairQueue.peek", "/engine/schedule/scheduler.py", "outside of every try of a request"),
    ("ActiveRequest.remaining", "/engine/schedule/scheduler.py", "rows of a prompt are chosen"),
    ("ActiveRequest.all_token_ids", "/engine/core.py", "a session is to hold the answer"),
    ("SlotAllocator.release", "/engine/kv/holdings.py", "a request is gone and its slots are not"),
    ("SlotAllocator.retain", "/engine/kv/kv_space.py", "a prefix is stored whose slots the allocator gives away"),
    ("EvictionQueue.add", "/prefix/radix/base.py", "a leaf waits nowhere"),
    ("PassageIndex.remove", "/donors/finder.py", "a donor is half forgotten"),
    ("AnchorIndex.insert", "/donors/finder.py", "a donor is half known"),
    ("TokenArena.store", "/donors/finder.py", "a row without tokens"),
    ("IdleHealer.wake", "/engine/core.py", "a request is forgotten before its answer is handed on"),
    ("DonorCatalogue._entry", "/donors/catalogue.py", "a donor stays pinned"),
    ("IdleHealer.add", "/engine/core.py", "a request has ended and is not forgotten"),
    ("id_in_row", "/donors/catalogue.py", "a row is lost"),
]


@pytest.fixture(scope="module")
def plain():
    return Drill("plain")


@pytest.fixture(scope="module")
def plain_places(plain, quick_looks):
    return plain.places()


@pytest.fixture(scope="module", autouse=True)
def quick_looks():
    """Short texts would make no graft that pays otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvgraft.engine.kv.planning.QUERY_ROWS", 0)
        yield


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["one of its calls", "another"])
@pytest.mark.parametrize(("callee", "caller", "what"), KNOWN, ids=[callee for callee, *_ in KNOWN])
def test_a_call_that_fails_leaves_a_sound_engine(plain, plain_places, callee, caller, what, which):  # noqa: PLR0917
    for place, number in points_at(plain_places, callee, caller)[which : which + 1]:
        assert not plain.failures(place, number), (place, number, what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_leaves_a_sound_engine(kind):
    drill = Drill(kind)
    found = {point: wrong for point in drawn(drill.places(), _FEW) if (wrong := drill.failures(*point))}
    assert not found
