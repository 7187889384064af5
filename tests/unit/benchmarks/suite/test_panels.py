"""Every committed record can be drawn, and what its picture shows are the figures of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.suite.page import load_record, panels_of
from benchmarks.suite.tables import TABLES

from kvgraft.bench.figure import draw_panels
from kvgraft.bench.panels import Bars, Lines, NamedPoint, Points, Series

RECORDS = sorted((Path(__file__).parents[4] / "benchmarks" / "results").glob("suite-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_committed_record_is_drawn(path, tmp_path):
    record = load_record(path)
    panels = panels_of(record)
    assert panels
    for panel in panels:
        for series in () if isinstance(panel, Points) else panel.series:
            assert len(series.values) == len(panel.places)
            assert any(value is not None for value in series.values), (panel.title, series.name)
        if isinstance(panel, Points):
            assert any(panel.groups.values())
    draw_panels(panels, "t", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_every_table_has_a_committed_record_to_draw():
    assert {load_record(path)["result"]["table"] for path in RECORDS} == set(TABLES)


def test_a_series_takes_a_field_and_its_interval():
    rows = [{"x": 0.5, "x_low": 0.4, "x_high": 0.7}, {"x": None}, {}]
    assert Series.of("n", rows, "x", 100) == Series("n", [50, None, None], [40, None, None], [70, None, None])


def test_a_zero_is_a_figure_and_not_an_absence():
    assert Series.of("n", [{"x": 0.0}], "x").values == [0.0]


def test_figures_that_are_missing_and_intervals_that_miss_their_figure_are_drawn(tmp_path):
    gap = Series("gap", [1.0, None], [0.5, None], [2.0, None])
    outside = Series("outside", [1.0, 2.0], [1.5, 1.0], [2.0, 1.5])
    panels = [
        Lines("t", "x", [1, 2], [gap, outside], is_log=True),
        Bars("t", ["a", "b"], [gap, outside], mark=1, is_log=True),
        Points(
            "t", "x", "y", {"g": [NamedPoint("p", 1, 0), NamedPoint("q", 2, 3, is_hollow=True)]}, y_linear_below=0.1
        ),
        Points("t", "x", "y", {"g": []}),
    ]
    draw_panels(panels, "t", tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_the_same_figures_are_the_same_file(tmp_path):
    for name in "ab":
        draw_panels([Bars("t", ["a"], [Series("s", [1.0])])], "t", tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
