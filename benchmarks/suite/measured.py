"""A table that a command measures with the embedded engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM

    from .settings import TableSettings

    Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A table and its measurement.

    Attributes:
        name: Subcommand; also the name of its records and of its layout in `tables`.
        title: Heading of its picture.
        about: Description of the subcommand.
        settings: Class of its settings.
        key: Fields that name a record of its journal.
        measure: Called with the model, the settings, the journal and `advance`, which it calls once per step; returns rows of
            strings, numbers and None, one per line of the table.
        prepare: Called with the model that was asked for and the settings; returns the model that is measured.
    """

    name: str
    title: str
    about: str
    settings: type[TableSettings]
    key: Sequence[str]
    measure: Callable[[LLM, Any, Journal, Callable[[], object]], list[Row]]
    prepare: Callable[[LLM, Any], LLM] = lambda llm, _: llm
