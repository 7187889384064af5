"""docs/results.md is what its records say."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.suite.page import BLOCK, blocks_of, first_records, load_records, source_of, update
from benchmarks.suite.tables import TABLES
from PIL import Image

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results.md"
COMMAND = "python -m benchmarks.suite page --plots docs/images"


@pytest.fixture(scope="module")
def records():
    return load_records(ROOT / "benchmarks" / "results")


def test_tables_are_made_of_the_committed_records(records):
    assert PAGE.read_text() == update(PAGE.read_text(), records), f"run: {COMMAND}"


def test_every_block_of_every_record_is_on_the_page_once(records):
    found = [(block["record"], block["block"]) for block in BLOCK.finditer(PAGE.read_text())]
    assert len(found) == len(set(found))
    assert set(found) == {(name, block) for name, record in records.items() for block in blocks_of(name, record)}


def test_pictures_are_drawn_from_the_committed_records(records):
    for table, record in first_records(records.values()).items():
        picture = Image.open(ROOT / "docs" / "images" / f"suite-{table}.png")
        assert picture.text["Comment"] == source_of(record), f"run: {COMMAND}"
        assert f"(images/suite-{table}.png)" in PAGE.read_text()


def test_records_are_named_after_their_tables(records):
    for name, record in records.items():
        assert name.removeprefix("suite-").split("-")[0] == record["result"]["table"]
    assert {record["result"]["table"] for record in records.values()} == set(TABLES)
