"""Figures of the last hour: what is kept of them, who follows a source, and what becomes of one that fails."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.samples import Sample

from kvgraft.inspector.following import followed
from kvgraft.inspector.timeline import Timeline


class Source:
    """Counts how often it is asked; the first `failures` times it fails."""

    def __init__(self, failures=0):
        self.timeline = Timeline()
        self.asked = 0
        self._failures = failures

    async def samples(self):
        self.asked += 1
        if self.asked <= self._failures:
            raise RuntimeError("no figures")
        return [Sample("kvgraft:prompt_tokens_total", {"kind": "prefix"}, float(self.asked))]


async def follow_until(source, condition):
    async with followed(source, 0.0):
        while not condition():
            await asyncio.sleep(0)


def test_the_oldest_points_leave():
    timeline = Timeline(limit=3)
    for at in range(9):
        timeline.add(float(at), {"tokens": {"fresh": at}})
    assert timeline.as_dicts() == [{"at": float(at), "tokens": {"fresh": at}, "slots": {}} for at in (6, 7, 8)]


@pytest.mark.parametrize("state", [{}, {"running": 3.0, "donors": 2.0}])
def test_a_moment_without_figures_is_no_point(state):
    timeline = Timeline()
    timeline.add(1.0, state)
    assert timeline.as_dicts() == []


def test_a_source_is_followed_as_long_as_the_context_lasts():
    source = Source()

    async def follow():
        await follow_until(source, lambda: source.asked >= 3)
        asked = source.asked
        await asyncio.sleep(0.01)
        assert source.asked == asked

    asyncio.run(follow())
    told = source.timeline.as_dicts()
    assert [point["tokens"]["prefix"] for point in told] == list(range(1, len(told) + 1))
    assert sorted(point["at"] for point in told) == [point["at"] for point in told]


def test_one_that_fails_leaves_a_gap_and_one_line(caplog):
    source = Source(failures=3)
    asyncio.run(follow_until(source, source.timeline.as_dicts))
    assert source.timeline.as_dicts()[0]["tokens"] == {"prefix": 4.0}
    assert len(caplog.records) == 1


def test_without_a_source_nothing_runs():
    async def follow():
        async with followed(None):
            return len(asyncio.all_tasks())

    assert asyncio.run(follow()) == 1
