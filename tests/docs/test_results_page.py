"""docs/results.md is what its records say."""

from __future__ import annotations

from pathlib import Path

from kvgraft.bench.suite.page import SECTIONS, load_record, page

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def records():
    """Records of the suite: `suite-TABLE.json`, and `suite-TABLE-WORD.json` where a table has more than one."""
    names = sorted(RESULTS.glob("suite-*.json"), key=lambda path: path.stem)
    return [load_record(path) for path in names]


def test_the_page_is_made_of_the_committed_records():
    command = "kvgraft bench suite page benchmarks/results/suite-*.json --output docs/results.md"
    assert (ROOT / "docs" / "results.md").read_text() == page(records()), f"run: {command}"


def test_records_are_named_after_their_tables():
    for path in RESULTS.glob("suite-*.json"):
        table = load_record(path)["result"]["table"]
        assert path.stem.removeprefix("suite-").split("-")[0] == table
        assert table in {section.name for section in SECTIONS}
