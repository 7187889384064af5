"""Commands `length`, `turns` and `cost` of the suite: their counts are true of the requests, and layouts show them."""

from __future__ import annotations

import json

import pytest
from benchmarks.suite import tables
from benchmarks.suite.__main__ import build_parser

from kvgraft.errors import ConfigError

SMALL = ("--model", "graft-tiny", "--num-slots", 6000, "--json")


def run(*argv):
    args = build_parser().parse_args([*map(str, argv)])
    assert args.run(args) == 0


def printed(capsys):
    return json.loads(capsys.readouterr().out)


def test_length_counts_what_is_reused_and_goes_on_from_its_journal(capsys, tmp_path):
    options = ("length", "--lengths", "400", "--shift", 100, "--rounds", 2, *SMALL, "--journal", tmp_path / "j")
    run(*options)
    found = printed(capsys)
    (row,) = found["rows"]
    assert (found["table"], row["length"], row["rounds"]) == ("length", 400, 2)
    assert row["repeat_exact_tokens"] == 399
    assert (row["none_reused_tokens"], row["none_computed_tokens"]) == (299, 101)
    assert row["default_reused_tokens"] + row["default_computed_tokens"] == 400
    assert 101 < row["default_computed_tokens"] < 200
    assert row["none_bound_ratio"] > row["default_bound_ratio"] > 1
    assert row["none_of_bound_share"] == row["none_speedup_ratio"] / row["none_bound_ratio"]
    assert row["none_speedup_ratio_low"] <= row["none_speedup_ratio"] <= row["none_speedup_ratio_high"]
    lines = (tmp_path / "j").read_text()
    run(*options)
    assert printed(capsys) == found
    assert (tmp_path / "j").read_text() == lines
    text = tables.length.BLOCKS["ratios"](found)
    assert "| 400 | 101 |" in text
    assert not tables.length.BLOCKS["claims"](found), "nothing was measured at the lengths of the claims"
    assert tables.length.panels(found)[0].series[0].name == "cold"


def test_longer_prompts_than_the_model_takes_need_random_weights(capsys):
    with pytest.raises(ConfigError, match="--random-context"):
        run("length", "--lengths", "40000", *SMALL)
    run("length", "--lengths", "500", "--rounds", 1, "--random-context", 70_000, *SMALL)
    found = printed(capsys)
    assert found["settings"]["model"] == "graft-tiny, random weights"
    assert found["rows"][0]["none_reused_tokens"] == 299


def test_turns_tell_what_each_mode_reused(capsys, tmp_path):
    options = (
        "turns",
        "--kinds",
        "growing",
        "clock",
        "--turns",
        5,
        "--files",
        1,
        *SMALL,
        "--num-slots",
        20_000,
        "--clock",
        "cpu",
    )
    run(*options, "--journal", tmp_path / "j")
    found = printed(capsys)
    rows = {(row["kind"], row["turns"]): row for row in found["rows"]}
    assert [turns for kind, turns in rows if kind == "clock"] == ["1", "2", "3", "4-5"]
    assert rows["growing", "1"]["graft_share"] == rows["clock", "1"]["exact_share"] == 0
    for turns in ("2", "3", "4-5"):
        growing, clock = rows["growing", turns], rows["clock", turns]
        assert growing["exact_share"] == pytest.approx(growing["prefix_share"], abs=0.02)
        assert growing["prefix_share"] > 0.6
        assert clock["prefix_share"] == 0
        assert clock["exact_share"] < 0.05
        assert 0.6 < clock["graft_share"] <= clock["bound_share"] + 0.05
        assert 0.6 < clock["healed_share"] <= clock["bound_share"] + 0.05
        assert clock["mean_healing_tokens"] > 0
        assert clock["graft_speedup_ratio"] > 0 < clock["graft_answer_speedup_ratio"]
    before = (tmp_path / "j").read_text()
    run(*options, "--journal", tmp_path / "j")
    assert printed(capsys) == found
    assert (tmp_path / "j").read_text() == before
    assert "| clock | 4-5 |" in tables.turns.BLOCKS["turns"](found)


def test_a_session_ends_where_the_engine_takes_no_longer_prompt(capsys):
    options = ("turns", "--kinds", "growing", "--turns", 3, "--files", 1, *SMALL, "--num-slots")
    run(*options, 20_000)
    lengths = [row["mean_tokens"] for row in printed(capsys)["rows"]]
    run(*options, int(lengths[2]))
    assert [row["turns"] for row in printed(capsys)["rows"]] == ["1", "2"], "with an answer the third is longer"
    with pytest.raises(ConfigError, match="KV slots"):
        run(*options, int(lengths[0]))


def test_cost_has_every_step_of_every_length_and_memory(capsys):
    run("cost", "--lengths", "400", "--shift", 100, "--rounds", 1, "--num-donors", 5, *SMALL)
    found = printed(capsys)
    steps = {row["step"]: row for row in found["rows"]}
    assert {row["length"] for row in found["rows"] if "length" in row} == {400}
    assert all(steps[name]["per_1k_tokens_ms"] > 0 for name in ("lookup", "register", "copy", "copy and rotate"))
    assert steps["memory of K/V"]["bytes"] == 6_144
    assert 20 < steps["memory of the catalogue"]["bytes"] < 2_000
    assert "| break-even hit rate |" in tables.cost.BLOCKS["steps"](found)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("length", "--rounds", 0), "--rounds must be at least 1, not 0"),
        (("length", "--lengths", "100"), r"--lengths must be at least --shift \+ 64 = 264"),
        (("cost", "--lengths", "100"), r"--lengths must be at least --shift \+ 64 = 264"),
        (("turns", "--turns", 1), "--turns must be at least 2, not 1"),
    ],
)
def test_numbers_out_of_range_are_told_before_a_model_is_loaded(argv, message):
    with pytest.raises(ConfigError, match=message):
        run(*argv)
