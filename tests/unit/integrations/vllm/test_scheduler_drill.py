"""A small allocation that fails anywhere in the scheduler's half costs donors, never vLLM's scheduler or an answer."""

from __future__ import annotations

import os

import pytest
from tests.support.failing_calls import drawn, points_at
from tests.support.vllm_drill import KINDS, Drill

_FEW = int(os.environ.get("DRILL_POINTS", "25"))
"""Points of one kind of engine in the slow test; there are some 2,300 of each kind."""

_HALF = "/integrations/vllm/scheduler/"
KNOWN = [
    ("Attempts.captures_of", f"{_HALF}graft_scheduler.py", "the commands of a step went nowhere"),
    ("DonorRegistry.writes", f"{_HALF}graft_scheduler.py", "news for workers were taken and not sent"),
    ("VLLMRequest.add_blocks", f"{_HALF}attempts.py", "blocks of a step are missing"),
    ("VLLMRequest.blocks_to", f"{_HALF}captures.py", "a text is half captured"),
    ("RegistryHoldings.give_up_texts", f"{_HALF}attempts.py", "a request ended and keeps room"),
    ("DonorCatalogue.get", f"{_HALF}holdings.py", "a donor stays pinned"),
    ("DonorRegistry._leaves", f"{_HALF}donor_registry.py", "workers keep what is gone"),
    ("Attempt.receive", f"{_HALF}attempts.py", "a step, an outcome or a reset is half taken"),
    ("PendingBlocks.settle", f"{_HALF}graft_scheduler.py", "others wait for blocks for ever"),
    ("Attempt._copied", "/reuse/attempt/machine.py", "the outcome of a graft is lost"),
    ("Grafts.copy", f"{_HALF}attempts.py", "vLLM counts on a graft that nobody makes"),
    ("Attempts.finish", f"{_HALF}graft_scheduler.py", "a request is forgotten and its text is not"),
    ("PassageIndex.remove", "/donors/finder.py", "a donor is half forgotten"),
    ("AnchorIndex.insert", "/donors/finder.py", "a donor is half known"),
    ("DonorQueue.discard", "/donors/catalogue.py", "a donor leaves and is counted"),
]


@pytest.fixture(scope="module")
def asynchronous():
    return Drill("async")


@pytest.fixture(scope="module")
def places(asynchronous):
    return asynchronous.places()


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["one of its calls", "another"])
@pytest.mark.parametrize(("callee", "caller", "what"), KNOWN, ids=[callee for callee, *_ in KNOWN])
def test_a_call_that_fails_leaves_sound_books(asynchronous, places, callee, caller, what, which):  # noqa: PLR0917
    for place, number in points_at(places, callee, caller)[which : which + 1]:
        assert not asynchronous.failures(place, number), (place, number, what)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_call_that_fails_leaves_sound_books(kind):
    drill = Drill(kind)
    found = {point: wrong for point in drawn(drill.places(), _FEW) if (wrong := drill.failures(*point))}
    assert not found
