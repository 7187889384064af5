"""docs/results.md is what its records say."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from kvgraft.bench.suite.page import SECTIONS, load_record, page, source_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COMMAND = "kvgraft bench suite page benchmarks/results/suite-*.json --output docs/results.md --plots docs/images"


def records():
    """Records of the suite: `suite-TABLE.json`, and `suite-TABLE-WORD.json` where a table has more than one."""
    names = sorted(RESULTS.glob("suite-*.json"), key=lambda path: path.stem)
    return [load_record(path) for path in names]


def test_the_page_is_made_of_the_committed_records():
    assert (ROOT / "docs" / "results.md").read_text() == page(records(), "images"), f"run: {COMMAND}"


def test_pictures_are_drawn_from_the_committed_records():
    firsts = {record["result"]["table"]: record for record in reversed(records())}
    for table, record in firsts.items():
        picture = Image.open(ROOT / "docs" / "images" / f"suite-{table}.png")
        assert picture.text["Comment"] == source_of(record), f"run: {COMMAND}"


def test_records_are_named_after_their_tables():
    for path in RESULTS.glob("suite-*.json"):
        table = load_record(path)["result"]["table"]
        assert path.stem.removeprefix("suite-").split("-")[0] == table
        assert table in {section.name for section in SECTIONS}
