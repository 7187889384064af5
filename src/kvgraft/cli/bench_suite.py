"""`kvgraft bench suite`: the tables that people choose by, each a command of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.cli import (
    suite_cost,
    suite_datasets,
    suite_length,
    suite_page,
    suite_quality,
    suite_similarity,
    suite_turns,
)

if TYPE_CHECKING:
    import argparse
    from types import ModuleType

_TABLES: tuple[ModuleType, ...] = (
    suite_length,
    suite_similarity,
    suite_datasets,
    suite_turns,
    suite_quality,
    suite_cost,
    suite_page,
)
"""Modules with `register(subparsers)` and `run(args)`, in the order of the page."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its tables."""
    parser = subparsers.add_parser(
        "suite",
        help="tables of time, reuse and fidelity, one command each",
        description="Measure one table with the embedded engine, or make the page of all that were measured.",
    )
    tables = parser.add_subparsers(title="tables", metavar="TABLE", required=True)
    for table in _TABLES:
        table.register(tables)
