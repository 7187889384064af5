"""The page of all tables, from committed records alone. Measures nothing."""

from __future__ import annotations

import json
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Record = Mapping[str, Any]


class Section(NamedTuple):
    """A table's place on the page.

    Attributes:
        number: Of the table, as in T1.
        name: Of the table, as on the command line; `kvgraft.bench.suite.{name}_page` renders its records.
        title: Heading.
    """

    number: str
    name: str
    title: str


SECTIONS = (
    Section("T1", "length", "Time to first token by length"),
    Section("T2", "similarity", "Documents that were edited"),
    Section("T3", "datasets", "What data sets share, and what reuse makes of it"),
    Section("T4", "turns", "Conversations and agents, turn by turn"),
    Section("T5", "engines", "Three engines"),
    Section("T6", "quality", "The perplexity ratio, and what it hides"),
    Section("T7", "peers", "Others that reuse K/V"),
    Section("T8", "cost", "What reuse costs, and when it pays"),
)

_HEAD = """# Results

Made by `kvgraft bench suite page` from the records in `benchmarks/results/`, which hold every figure with its command,
commit, versions and machine. Do not edit it. How to read the figures of fidelity is in [fidelity.md](fidelity.md), other
benchmarks are in [benchmarks.md](benchmarks.md). Reused tokens are counted by the engines, never inferred from times. Ratios
mean something, seconds do not: the machine is small and shared."""


def load_record(path: Path) -> Record:
    """Read a record of one of the tables.

    Raises:
        ConfigError: The file cannot be read or is no such record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        table = record["result"]["table"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no record of the suite ({error!r}); make one with benchmarks/record.py NAME -- kvgraft bench suite "
            "TABLE --json"
        ) from error
    if table not in {section.name for section in SECTIONS}:
        raise ConfigError(f"{path} is of table {table!r}, which the page does not have; leave it out")
    found: Record = record
    return found


def page(records: Sequence[Record]) -> str:
    """Return the page; of a table with several records, which differ in settings, all are shown, in their order."""
    parts = [_HEAD, _contents(records)]
    for section in SECTIONS:
        own = [record for record in records if record["result"]["table"] == section.name]
        parts.append(f"## {section.number}. {section.title}")
        parts += [_rendered(section, record) for record in own] or ["Not measured yet."]
    return "\n\n".join(parts) + "\n"


def _contents(records: Sequence[Record]) -> str:
    known = {record["result"]["table"] for record in records}
    lines = [
        f"- {section.number}: {section.title}" + ("" if section.name in known else " (not measured yet)")
        for section in SECTIONS
    ]
    return "\n".join(lines)


def _rendered(section: Section, record: Record) -> str:
    """A record's tables and where they come from."""
    versions = ", ".join(
        f"{name} {version}" for name, version in record["versions"].items() if version != "not installed"
    )
    command = re.sub(r" --journal \S+", "", record["command"])
    source = (
        f"`{command}`, commit {record['commit']}, {record['date']}, seed "
        f"{record['result']['settings'].get('seed', 0)}; {record['machine']}; {versions}."
    )
    body: str = import_module(f"kvgraft.bench.suite.{section.name}_page").render(record)
    return f"{body}\n\nSource: {source}"
