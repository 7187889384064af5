"""docs/reference/commands.md: every command and what it is for; options are told by `--help`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvgraft.cli import build_parser

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """\
# Commands

Each shows its options, with examples, by `--help`.

| command | does |
|---|---|
"""


def commands_page() -> str:
    """Return the page."""
    return _HEAD + "".join(f"| `kvgraft {name}` | {text} |\n" for name, text in _commands(build_parser(), ""))


def _commands(parser: argparse.ArgumentParser, before: str) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                below = list(_commands(action.choices[choice.dest], f"{before}{choice.dest} "))
                yield from below or [(f"{before}{choice.dest}", str(choice.help))]
