"""The page shows the records that it names, each with its source, and refuses other files."""

from __future__ import annotations

import json

import pytest
from benchmarks.suite.__main__ import main
from benchmarks.suite.page import blocks_of, draw_pictures, load_record, panels_of, update
from benchmarks.suite.tables import TABLES

from kvgraft.errors import ConfigError

ROW = {
    "length": 1024,
    "rounds": 3,
    **{f"{name}_ms": 10.0 for name in ("cold", "miss", "none", "default", "repeat")},
    **{f"{name}_p95_ms": 12.0 for name in ("cold", "miss", "none", "default", "repeat")},
    **{f"{name}_computed_tokens": 200 for name in ("none", "default")},
    **{f"{name}_speedup_ratio": 2.5 for name in ("none", "default", "repeat")},
    **{f"{name}_bound_ratio": 5.0 for name in ("none", "default")},
    **{f"{name}_of_bound_share": 0.5 for name in ("none", "default")},
}
SETTINGS = {
    "model": "m",
    "rounds": 3,
    "seed": 7,
    "engines": {"vLLM": {"torch": "2"}},
    "absent": [],
    "kinds": ["a", "b"],
    "dtype": "float32",
}


def record(**changes):
    return {
        "command": "python -m benchmarks.suite length --journal runs/j --json",
        "commit": "abc1234",
        "date": "2026-11-23",
        "versions": {"python": "3.11", "torch": "2.13.0", "vllm": "not installed"},
        "machine": "2 cores",
        "result": {"table": "length", "title": "t", "settings": SETTINGS, "rows": [ROW]},
    } | changes


def marked(*names):
    return "\n\n".join(["# Words", *(f"<!-- begin:{name} -->\nold\n<!-- end:{name} -->\n\nWords." for name in names)])


def test_blocks_are_written_and_words_stay():
    page = update(marked("suite-length/ratios", "suite-length/source"), {"suite-length": record()})
    assert "50.0 % of 5.0x" in page
    assert "old" not in page
    assert page.startswith("# Words\n\n<!-- begin:suite-length/ratios -->\n")
    assert page.count("Words.") == 2
    assert update(page, {"suite-length": record()}) == page


def test_a_source_links_the_record_and_has_what_is_unusual_of_its_settings():
    assert blocks_of("suite-length", record())["source"] == (
        "Record: [`suite-length.json`](../benchmarks/results/suite-length.json), commit abc1234, 2026-11-23; 2 cores; "
        "model m; rounds 3; seed 7; engines vLLM (torch 2)."
    )


@pytest.mark.parametrize(("found", "said"), [((2, 2), "rounds 2;"), ((10, 6), "rounds 6-10;")])
def test_a_source_has_the_rounds_of_the_rows_and_not_those_that_were_asked_for(found, said):
    rows = [ROW | {"rounds": rounds} for rounds in found]
    result = record()["result"] | {"rows": rows}
    assert said in blocks_of("suite-length", record(result=result))["source"]


def test_a_block_without_figures_is_none():
    assert "claims" not in blocks_of("suite-length", record())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("suite-length/claims", "suite-length has no block 'claims'; choose of times, ratios, source"),
        ("suite-other/source", "no record suite-other.json"),
    ],
)
def test_blocks_of_nothing_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        update(marked(name), {"suite-length": record()})


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


@pytest.fixture
def results(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "suite-length.json").write_text(json.dumps(record()))
    return folder


def test_the_command_writes_the_page_and_a_picture_of_each_table(tmp_path, results):
    page, plots = tmp_path / "page.md", tmp_path / "images"
    page.write_text(marked("suite-length/times"))
    plots.mkdir()
    assert main(["page", "--page", str(page), "--results", str(results), "--plots", str(plots)]) == 0
    assert "| 1,024 | 3 | 10 (12) |" in page.read_text()
    assert (plots / "suite-length.png").read_bytes().startswith(b"\x89PNG")
    assert [each.name for each in plots.iterdir()] == ["suite-length.png"]


def test_pictures_go_into_a_folder_that_is_there(tmp_path, results, capsys):
    page = tmp_path / "page.md"
    page.write_text("")
    assert main(["page", "--page", str(page), "--results", str(results), "--plots", str(tmp_path / "absent")]) == 2
    assert "create it first" in capsys.readouterr().err


def test_of_several_records_of_a_table_the_first_is_drawn(tmp_path):
    other = record()
    other["result"] = other["result"] | {"rows": [ROW | {"length": 2048, "cold_ms": 99.0}]}
    for number, records in enumerate(([record(), other], [record()], [other])):
        (tmp_path / str(number)).mkdir()
        draw_pictures(records, tmp_path / str(number))
    both, first, second = ((tmp_path / str(number) / "suite-length.png").read_bytes() for number in range(3))
    assert both == first != second


def test_panels_are_of_the_table():
    assert panels_of(record())[0].series[0].name == "cold"
    names = [
        "length",
        "similarity",
        "datasets",
        "turns",
        "engines",
        "quality",
        "peers",
        "cost",
        "repair",
        "answers",
        "cosine",
        "recorded",
    ]
    assert list(TABLES) == names
