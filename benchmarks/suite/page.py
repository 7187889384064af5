"""Tables, figures and pictures of docs/results.md, from committed records alone. Measures nothing.

The page is written by hand but for its blocks: lines from `<!-- begin:RECORD/BLOCK -->` to `<!-- end:RECORD/BLOCK -->` are
written from `benchmarks/results/RECORD.json`. `BLOCK` is one of the `BLOCKS` of the table's module in `tables`, or `source`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ConfigError

from .tables import TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kvgraft.bench.panels import Panel

    Record = Mapping[str, Any]

BLOCK = re.compile(
    r"<!-- begin:(?P<record>[\w-]+)/(?P<block>\w+) -->\n.*?<!-- end:(?P=record)/(?P=block) -->", re.DOTALL
)
_NOT_SHOWN = frozenset({"data", "minutes", "lengths", "edits", "names", "kinds", "suites", "policies", "cases"})
"""Settings on which no figure depends, and those that name the rows of the table."""
_USUAL = {"model": "smollm2-135m", "dtype": "float32", "policy": "query_seam", "recompute_ratio": 0.1}
_USUAL |= {"correction": "drift", "clock": "wall", "random_context": 0, "seed": 0}
"""Settings that the head of the page names; a record's source shows those that differ."""


def load_record(path: Path) -> Record:
    """Read a record of one of the tables.

    Raises:
        ConfigError: The file cannot be read or is no such record.
    """
    try:
        record: Record = json.loads(path.read_text(encoding="utf-8"))
        table = record["result"]["table"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no record of the suite ({error!r}); make one with benchmarks/record.py NAME -- python -m "
            "benchmarks.suite TABLE --json"
        ) from error
    if table not in TABLES:
        raise ConfigError(f"{path} is of table {table!r}, which the page does not have; leave it out")
    return record


def load_records(folder: Path) -> dict[str, Record]:
    """Read all records of a folder, `suite-TABLE.json` or `suite-TABLE-WORD.json`, in order of their names."""
    return {path.stem: load_record(path) for path in sorted(folder.glob("suite-*.json"), key=lambda path: path.stem)}


def update(page: str, records: Mapping[str, Record]) -> str:
    """Return the page with all its blocks written anew.

    Args:
        page: Markdown with markers.
        records: By name of the file, without the ending.

    Raises:
        ConfigError: A block is of no record, or of none of its table's blocks.
    """
    return BLOCK.sub(lambda found: _block(found["record"], found["block"], records), page)


def blocks_of(name: str, record: Record) -> dict[str, str]:
    """Return the Markdown of every block of the record in `NAME.json` that has something to show."""
    result = record["result"]
    found = {block: render(result) for block, render in TABLES[result["table"]].BLOCKS.items()}
    return {block: text for block, text in found.items() if text} | {"source": _source_block(name, record)}


def draw_pictures(records: Iterable[Record], folder: Path) -> None:
    """Draw a picture of every table's first record into `folder`, `suite-TABLE.png`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from kvgraft.bench.figure import draw_panels

    for table, record in first_records(records).items():
        settings = record["result"]["settings"]
        title = ", ".join([settings["model"], *([settings["dtype"]] if "dtype" in settings else []), record["machine"]])
        draw_panels(panels_of(record), title, folder / f"suite-{table}.png", source=source_of(record))


def first_records(records: Iterable[Record]) -> dict[str, Record]:
    """Return the first record of every table."""
    found: dict[str, Record] = {}
    for record in records:
        found.setdefault(record["result"]["table"], record)
    return found


def source_of(record: Record) -> str:
    """Return the command that made a record, and its commit and day."""
    command = re.sub(r" --journal \S+", "", record["command"])
    return f"`{command}`, commit {record['commit']}, {record['date']}"


def panels_of(record: Record) -> list[Panel]:
    """Return the panels of a record's picture, from left to right; only its `result` is read."""
    result = record["result"]
    panels: list[Panel] = TABLES[result["table"]].panels(result)
    return panels


def _block(name: str, block: str, records: Mapping[str, Record]) -> str:
    if name not in records:
        raise ConfigError(f"the page has a block of {name}, and there is no record {name}.json; remove the block")
    blocks = blocks_of(name, records[name])
    if block not in blocks:
        raise ConfigError(f"record {name} has no block {block!r}; choose of {', '.join(blocks)}")
    return f"<!-- begin:{name}/{block} -->\n\n{blocks[block]}\n\n<!-- end:{name}/{block} -->"


def _source_block(name: str, record: Record) -> str:
    """Link a record, with its commit, day and machine and what of its settings is unusual; it has the command."""
    settings = dict(record["result"]["settings"])
    if (rounds := _rounds(record["result"]["rows"])) and "rounds" in settings:
        settings["rounds"] = rounds
    unusual = [
        f"{name} {_setting(value)}"
        for name, value in settings.items()
        if name not in _NOT_SHOWN and value not in ([], "") and (name, value) not in _USUAL.items()
    ]
    link = f"[`{name}.json`](../benchmarks/results/{name}.json)"
    return (
        "; ".join([f"Record: {link}, commit {record['commit']}, {record['date']}", record["machine"], *unusual]) + "."
    )


def _rounds(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rounds that the rows have, which are fewer than was asked for where the minutes were over; empty if no row says."""
    found = [row["rounds"] for row in rows if "rounds" in row]
    if not found:
        return ""
    return f"{min(found):,}" if min(found) == max(found) else f"{min(found):,}-{max(found):,}"


def _setting(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(
            f"{name} ({_setting(each)})" if isinstance(each, dict) else f"{name} {each}" for name, each in value.items()
        )
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
