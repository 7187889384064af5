"""Tables T9 and T10 on the bundled model: settings are compared on the same requests, and layouts show the figures."""

from __future__ import annotations

import json

import numpy as np
import pytest
from benchmarks.suite import tables
from benchmarks.suite.__main__ import build_parser
from benchmarks.suite.methods import ALL_SUITES
from benchmarks.suite.repair import EXACT, NONE, RepairSettings
from benchmarks.suite.walk import Walk, in_turns
from tests.support.notes import write_pairs_of_notes

from kvgraft.bench.fidelity.suites import Suite
from kvgraft.errors import ConfigError

BEFORE, AFTER = "query_seam:0.2+drift", "query_seam:0.2+drift@after"
ROWS = f"{AFTER}:64"
MODEL = ("--model", "graft-tiny", "--num-slots", "6000", "--json")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A pack of pairs of notes that differ in the answer to one question, and a journal."""
    folder = tmp_path_factory.mktemp("packs")
    write_pairs_of_notes(folder, 8)
    sample = ("--sample", "adversarial:4", "builtin:2", "absent:3", "--answers-every", "2", "--controls", "1")
    settings = ("--policies", NONE, BEFORE, AFTER, ROWS, "--data", str(folder), "--journal", str(folder / "j"))
    return ["repair", *sample, *settings, *MODEL]


def run(capsys, argv):
    args = build_parser().parse_args(argv)
    assert args.run(args) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def found(options, capsys):
    """The first call measures; others read the journal, which is asserted below."""
    return run(capsys, options)


def rows_of(found, suite):
    return {row["setting"]: row for row in found["rows"] if row["suite"] == suite}


def records_of(options):
    path = options[options.index("--journal") + 1]
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file][1:]


def test_a_row_per_suite_and_setting_and_those_of_all_first(found):
    assert list(dict.fromkeys(row["suite"] for row in found["rows"])) == [ALL_SUITES, "adversarial", "builtin"]
    assert list(rows_of(found, "adversarial")) == [NONE, BEFORE, AFTER, ROWS, EXACT]
    assert {name: row["requests"] for name, row in rows_of(found, "adversarial").items()} == {
        NONE: 4,
        BEFORE: 4,
        AFTER: 4,
        ROWS: 2,
        EXACT: 1,
    }
    assert found["settings"]["absent"] == ["absent"]


def test_the_first_token_is_none_s_and_later_ones_are_those_of_a_repair_before_it(found):
    rows = rows_of(found, "adversarial")
    assert rows[NONE]["kl_ratio"] == rows[NONE]["later_kl_ratio"] == 1
    assert rows[AFTER]["first_kl_ratio"] == pytest.approx(1, rel=1e-3)
    assert rows[BEFORE]["first_kl_ratio"] != pytest.approx(1, rel=1e-2)
    assert rows[AFTER]["later_kl_ratio"] == pytest.approx(rows[BEFORE]["later_kl_ratio"], rel=1e-2)
    assert rows[EXACT]["mean_kl"] < 1e-9


def test_ratios_are_of_the_requests_that_a_setting_was_asked(found, options):
    """Rows in every step are measured on every second request, and divided by the error of `none` on these."""
    records = [record for record in records_of(options) if record["suite"] == "adversarial"]
    asked = [record["settings"] for record in records if ROWS in record["settings"]]
    assert len(asked) == 2
    own, none = (np.mean([settings[name]["token_kl"] for settings in asked]) for name in (ROWS, NONE))
    row = rows_of(found, "adversarial")[ROWS]
    assert row["kl_ratio"] == pytest.approx(own / none)
    assert row["kl_ratio_9_32"] < 1e-3 < row["kl_ratio_2"], "all rows are exact after a few steps"
    assert row["scored"] == 2
    assert "task" not in next(record for record in records if ROWS not in record["settings"])["off"]


def test_a_run_that_is_over_measures_nothing_more_and_writes_no_text(found, options, capsys):
    path = options[options.index("--journal") + 1]
    with open(path, encoding="utf-8") as file:
        before = file.read()
    assert run(capsys, options)["rows"] == found["rows"]
    with open(path, encoding="utf-8") as file:
        assert file.read() == before
    assert "shelf" not in before.lower()


def test_out_of_time_rows_are_of_what_the_journal_has(options, capsys, tmp_path, monkeypatch):
    times = iter([0.0, *[30.0] * 3, *[61.0] * 99])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    argv = [*options, "--minutes", "1", "--journal", str(tmp_path / "j")]
    rows = run(capsys, argv)["rows"]
    assert sum(row["requests"] for row in rows if row["suite"] != ALL_SUITES and row["setting"] == NONE) <= 3
    assert len((tmp_path / "j").read_text().splitlines()) == 1 + 3


def test_suites_are_measured_in_turns():
    walks = [
        Walk(Suite(name, ()), tuple((number,) for number in range(count)), 0) for name, count in (("a", 4), ("b", 2))
    ]
    assert [walk.suite.name for walk in in_turns(walks)] == ["a", "b", "a", "a", "b", "a"]
    assert [walk.blocks for walk in in_turns(walks)][::5] == [((0,),), ((3,),)]


def test_layouts_of_the_errors(found):
    text = tables.repair.BLOCKS["suites"](found)
    row = rows_of(found, ALL_SUITES)[AFTER]
    assert f"| `{AFTER}` | {row['requests']} |" in text
    assert f"| {row['later_kl_ratio']:.2f} [" in text
    assert f"| {EXACT} |" in text
    assert len({line.count("|") for line in text.splitlines() if line.startswith("|")}) == 1
    assert f"`{ROWS}`" in text
    (bars,) = tables.repair.panels(found)
    assert list(bars.places) == [NONE, BEFORE, AFTER, ROWS]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": ("default",)}, "--policies has no 'none'"),
        ({"sample": ("builtin",)}, "--sample has 'builtin'; give SUITE:LIMIT"),
        ({"sample": ("builtin:0",)}, "--sample has 'builtin:0'"),
        ({"answers_every": 0}, "--answers-every must be at least 1"),
    ],
)
def test_wrong_settings_get_a_line(options, message):
    with pytest.raises(ConfigError, match=message):
        RepairSettings(**options)


def test_times_of_answers_by_length_and_way(capsys, tmp_path):
    options = [
        "answers",
        "--lengths",
        "400",
        "300",
        "--shift",
        "60",
        "--question",
        "40",
        "--tokens",
        "4",
        "--rounds",
        "2",
    ]
    options += ["--policies", NONE, BEFORE, AFTER, "--journal", str(tmp_path / "j"), *MODEL]
    found = run(capsys, options)
    rows = {(row["length"], row["way"]): row for row in found["rows"]}
    assert list(rows)[:5] == [(400, way) for way in ("off", "exact hit", NONE, BEFORE, AFTER)]
    computed = {way: rows[300, way]["computed_tokens"] for way in ("off", "exact hit", NONE, BEFORE, AFTER)}
    assert computed == {"off": 300, "exact hit": 100, NONE: 100, BEFORE: 140, AFTER: 140}
    for row in rows.values():
        assert row["rounds"] == 2
        assert 0 < row["ttft_ms"] < row["total_ms"]
        assert row["second_gap_ms"] > 0 < row["later_gap_ms"]
    assert rows[400, "exact hit"]["ttft_of_hit_ratio"] == rows[400, "off"]["total_of_off_ratio"] == 1
    written = (tmp_path / "j").read_text()
    assert run(capsys, options) == found
    assert (tmp_path / "j").read_text() == written
    text = tables.answers.BLOCKS["times"](found)
    assert f"| 300 | `{AFTER}` | 140 |" in text
    assert "| 400 | exact hit | 100 |" in text
    lines = tables.answers.panels(found)[0]
    assert list(lines.places) == [400, 300]
    assert [series.name for series in lines.series] == ["off", "exact hit", NONE, BEFORE, AFTER]


def test_the_new_tokens_of_answers_leave_a_document():
    args = build_parser().parse_args(["answers", "--lengths", "150", "--shift", "50", "--question", "50"])
    with pytest.raises(ConfigError, match=r"--shift \+ --question \+ 64 = 164"):
        args.run(args)
