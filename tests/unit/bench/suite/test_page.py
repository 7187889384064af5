"""The page shows the records that it is given, each with its source, names what is missing, and refuses other files."""

from __future__ import annotations

import json
from importlib import import_module

import pytest

from kvgraft.bench.suite.page import SECTIONS, draw_pictures, load_record, page
from kvgraft.cli import main
from kvgraft.errors import ConfigError

ROW = {
    "length": 1024,
    **{f"{name}_ms": 10.0 for name in ("cold", "miss", "none", "default", "repeat")},
    **{f"{name}_p95_ms": 12.0 for name in ("cold", "miss", "none", "default", "repeat")},
    "miss_overhead_percent": 0.5,
    **{f"{name}_computed_tokens": 200 for name in ("none", "default")},
    **{f"{name}_speedup_ratio": 2.5 for name in ("none", "default", "repeat")},
    **{f"{name}_bound_ratio": 5.0 for name in ("none", "default")},
    **{f"{name}_of_bound_share": 0.5 for name in ("none", "default")},
}


def record(**changes):
    settings = {
        "model": "m",
        "dtype": "float32",
        "rounds": 3,
        "shift": 200,
        "seed": 7,
        "policy": "query_seam",
        "recompute_ratio": 0.1,
        "correction": "drift",
    }
    return {
        "command": "kvgraft bench suite length --json",
        "commit": "abc1234",
        "date": "2026-11-23",
        "versions": {"python": "3.11", "torch": "2.13.0", "vllm": "not installed"},
        "machine": "2 cores",
        "result": {"table": "length", "title": "t", "settings": settings, "rows": [ROW]},
    } | changes


def test_every_table_can_be_rendered_and_drawn():
    for section in SECTIONS:
        module = import_module(f"kvgraft.bench.suite.{section.name}_page")
        assert callable(module.render)
        assert callable(module.panels)


def test_a_record_is_shown_with_its_source_and_others_are_missed():
    text = page([record()])
    assert (
        "Source: `kvgraft bench suite length --json`, commit abc1234, 2026-11-23, seed 7; 2 cores; python 3.11" in text
    )
    assert "vllm" not in text.split("Source:")[1].split("\n")[0]
    assert "50.0 % of 5.0x" in text
    assert text.count("Not measured yet.") == len(SECTIONS) - 1
    assert "- T1: Time to first token by length\n" in text
    assert "- T2: Documents that were edited (not measured yet)\n" in text


def test_both_records_of_a_table_are_shown_in_their_order():
    text = page([record(commit="first"), record(commit="second")])
    assert text.index("commit first") < text.index("commit second")
    assert text.count("## T1.") == 1


@pytest.mark.parametrize("content", ["", "[]", '{"result": {}}', '{"result": {"rows": []}}', '{"result": 3}'])
def test_files_that_are_no_records_are_refused(tmp_path, content):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no record of the suite"):
        load_record(path)
    with pytest.raises(ConfigError, match="no record of the suite"):
        load_record(tmp_path / "absent.json")


def test_records_of_other_tables_are_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"result": {"table": "other"}}))
    with pytest.raises(ConfigError, match="table 'other'"):
        load_record(path)


def test_the_page_is_written_and_shows_a_picture_of_each_table(tmp_path):
    path = tmp_path / "suite-length.json"
    path.write_text(json.dumps(record()))
    out, plots = tmp_path / "page.md", tmp_path / "images"
    plots.mkdir()
    assert main(["bench", "suite", "page", str(path), "--output", str(out)]) == 0
    assert out.read_text() == page([record()])
    assert "![" not in out.read_text()
    assert main(["bench", "suite", "page", str(path), "--output", str(out), "--plots", str(plots)]) == 0
    assert out.read_text() == page([record()], "images")
    assert "![Time to first token by length](images/suite-length.png)" in out.read_text()
    assert (plots / "suite-length.png").read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in plots.iterdir()] == ["suite-length.png"]


def test_pictures_go_into_a_folder_that_is_there(tmp_path, capsys):
    path = tmp_path / "suite-length.json"
    path.write_text(json.dumps(record()))
    assert main(["bench", "suite", "page", str(path), "--plots", str(tmp_path / "absent")]) == 2
    assert "create it first" in capsys.readouterr().err


def test_of_several_records_of_a_table_the_first_is_drawn(tmp_path):
    other = record()
    other["result"] = other["result"] | {"rows": [ROW | {"length": 2048, "cold_ms": 99.0}]}
    for number, records in enumerate(([record(), other], [record()], [other])):
        (tmp_path / str(number)).mkdir()
        draw_pictures(records, tmp_path / str(number))
    both, first, second = ((tmp_path / str(number) / "suite-length.png").read_bytes() for number in range(3))
    assert both == first != second
