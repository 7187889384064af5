"""Commands `datasets` and `quality` of the suite, from their arguments to what they print."""

from __future__ import annotations

import json

import pytest
from benchmarks.suite.__main__ import build_parser
from benchmarks.suite.page import panels_of
from benchmarks.suite.tables import TABLES

from kvgraft.errors import ConfigError

SMALL = ("--limit", 1, "--max-prompt-tokens", 700, "--data", "nowhere", "--model", "graft-tiny", "--num-slots", 4000)


def run(*argv):
    args = build_parser().parse_args([*map(str, argv)])
    return args.run(args)


@pytest.mark.parametrize(
    ("table", "options"),
    [
        ("datasets", ("--names", "builtin", "tools", "--rounds", 1)),
        ("quality", ("--suites", "builtin", "tools", "--policies", "none", "--noise-floor", 0)),
    ],
)
def test_json_is_a_table_that_the_page_can_lay_out(capsys, tmp_path, table, options):
    journal = tmp_path / "journal.jsonl"
    assert run(table, *options, *SMALL, "--journal", journal, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["table", "title", "settings", "rows"]
    assert found["table"] == table
    assert found["settings"]["absent"] == ["tools"]
    assert found["settings"]["model"] == "graft-tiny"
    assert {type(value) for row in found["rows"] for value in row.values()} <= {str, int, float, type(None)}
    assert panels_of({"result": found})
    assert all(render(found) for render in TABLES[table].BLOCKS.values())
    plot = tmp_path / "plot.png"
    assert run(table, *options, *SMALL, "--journal", journal, "--plot", plot) == 0
    assert "tools: not in nowhere, left out" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"other arguments \(seed\)"):
        run(table, *options, *SMALL, "--journal", journal, "--seed", 1)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("datasets", "--limit", 0), "--limit must be at least 1, not 0"),
        (("datasets", "--min-run", 8), "--min-run must be at least 16"),
        (("quality", "--noise-floor", -1), "--noise-floor must be at least 0"),
        (("length", "--plot", "nowhere/plot.png"), "--plot .* the folder does not exist"),
        (("cost", "--plot", "."), "--plot . is a folder"),
    ],
)
def test_numbers_out_of_range_are_told_before_a_model_is_loaded(argv, message):
    with pytest.raises(ConfigError, match=message):
        run(*argv)
