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

    from kvgraft.bench.panels import Panel

    Record = Mapping[str, Any]


class Section(NamedTuple):
    """A table's place on the page.

    Attributes:
        number: Of the table, as in T1.
        name: Of the table, as on the command line; `kvgraft.bench.suite.{name}_page` renders and draws its records.
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

_PICTURE = """![{section.title}]({pictures}/suite-{section.name}.png)

Drawn by `kvgraft bench suite page benchmarks/results/suite-*.json --output docs/results.md --plots docs/images`."""


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


def page(records: Sequence[Record], pictures: str = "") -> str:
    """Return the page; of a table with several records, which differ in settings, all are shown, in their order.

    Args:
        records: In the order in which those of one table are shown.
        pictures: Where `draw_pictures` has put them, as the page links to them; nothing for a page without.
    """
    parts = [_HEAD, _contents(records)]
    for section in SECTIONS:
        own = [record for record in records if record["result"]["table"] == section.name]
        parts.append(f"## {section.number}. {section.title}")
        if own and pictures:
            parts.append(_PICTURE.format(section=section, pictures=pictures))
        parts += [_rendered(section, record) for record in own] or ["Not measured yet."]
    return "\n\n".join(parts) + "\n"


def draw_pictures(records: Sequence[Record], folder: Path) -> None:
    """Draw a picture of every table's first record into `folder`, `suite-TABLE.png`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from kvgraft.bench.figure import draw_panels

    firsts = {record["result"]["table"]: record for record in reversed(records)}
    for table, record in firsts.items():
        told = record["result"]["settings"]
        title = ", ".join([told["model"], *([told["dtype"]] if "dtype" in told else []), record["machine"]])
        draw_panels(panels_of(table, record), title, folder / f"suite-{table}.png", source=source_of(record))


def source_of(record: Record) -> str:
    """The command that made a record, and the commit and day on which it did."""
    command = re.sub(r" --journal \S+", "", record["command"])
    return f"`{command}`, commit {record['commit']}, {record['date']}"


def panels_of(table: str, record: Record) -> list[Panel]:
    """What is drawn of a record; only its `result` is read."""
    found: list[Panel] = _module(table).panels(record)
    return found


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
    seed = record["result"]["settings"].get("seed", 0)
    source = f"{source_of(record)}, seed {seed}; {record['machine']}; {versions}."
    body: str = _module(section.name).render(record)
    return f"{body}\n\nSource: {source}"


def _module(table: str) -> Any:  # noqa: ANN401 - a module, of which no type is known
    return import_module(f"kvgraft.bench.suite.{table}_page")
