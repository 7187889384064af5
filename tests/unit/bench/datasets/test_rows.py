"""Rows of files in every format, values at paths, and one line for what is wrong with either."""

from __future__ import annotations

import gzip
import json
import sys

import pytest

from kvgraft.bench.datasets.rows import field_of, read_rows, texts_of, value_at
from kvgraft.errors import ConfigError

ROWS = [{"id": "1", "text": "zwölf\nlines"}, {"id": "2", "text": 'a "quoted", text'}]
WRITTEN = {
    "rows.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS),
    "rows.json": json.dumps(ROWS),
    "named.json": json.dumps({"Version": 1, "Data": ROWS}),
    "lines.json": "".join(json.dumps(row) + "\n" for row in ROWS),
    "rows.csv": 'id,text\r\n1,"zwölf\nlines"\r\n2,"a ""quoted"", text"\r\n',
}


def write(path, text):
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", WRITTEN)
def test_every_format_has_the_same_rows(tmp_path, name, packed):
    path = write(tmp_path / (name + packed), WRITTEN[name])
    assert [row for _, row in read_rows(path)] == ROWS


def test_parquet_has_the_same_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [row | {"answers": [{"text": row["id"]}]} for row in ROWS]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    found = list(read_rows(path))
    assert [row for _, row in found] == rows
    assert found[1][0] == f"{path}: row 2"
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        list(read_rows(path))


def test_without_pyarrow_parquet_names_the_package_and_the_way_round(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install pyarrow, or give \.jsonl"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_lines_of_text_are_rows(tmp_path):
    path = write(tmp_path / "wiki.train.raw", " = Title = \n\nText .\n")
    assert [row for _, row in read_rows(path)] == [{"text": " = Title = "}, {"text": ""}, {"text": "Text ."}]


def test_a_cell_may_be_longer_than_the_standard_library_lets_it(tmp_path):
    path = write(tmp_path / "rows.csv", "text\n" + "x" * 200_000 + "\n")
    assert [len(str(row["text"])) for _, row in read_rows(path)] == [200_000]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.xml", "<a/>", r"rows are read from \.jsonl, \.json, \.csv"),
        ("rows.json", "[1, 2]", "neither an array of objects"),
        ("rows.json", '{"a": [{}], "b": [{}]}', "neither an array of objects nor an object with one"),
        ("rows.json", "{", r"rows\.json:1: not JSON"),
        ("rows.csv.gz", "not packed", "cannot be read"),
    ],
)
def test_wrong_files_are_told_in_one_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        list(read_rows(path))


def test_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.csv: cannot be read"):
        list(read_rows(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a", "text"),
        ("b.c", 1),
        ("b.none", None),
        ("turns.q", ["one", None, ["two"]]),
        ("pairs.Q", ["what?"]),
        ("a.b", None),
        ("none.at.all", None),
    ],
)
def test_paths_go_through_objects_lists_and_texts_that_are_lists(path, found):
    row = {
        "a": "text",
        "b": {"c": 1},
        "turns": [{"q": "one"}, {}, {"q": ["two"]}],
        "pairs": "[{'Q': 'what?', 'A': \"that's it\"}]",
    }
    assert value_at(row, path) == found


def test_texts_are_whole_and_not_blank():
    assert texts_of([" a ", ["b", None, ""], 7, 1.5, True, {"c": "d"}, "\ud800x"]) == ["a", "b", "7", "1.5", "?x"]


def test_the_first_path_with_a_text_counts():
    row = {"empty": [], "full": "text", "blank": " "}
    assert field_of(row, ("none", "empty", "full"), "document", "f:1") == "text"
    assert field_of(row, ("none", "blank"), "document", "f:1") == " "
    with pytest.raises(
        ConfigError, match=r"f:1: there is nothing at x or y; the row has empty, full, blank; give --document"
    ):
        field_of(row, ("x", "y"), "document", "f:1")
