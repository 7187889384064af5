"""What the tables of `kvgraft bench suite` that are made of requests have alike: options, model, journal, output."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvgraft.cli.model_options import engine_config, load_llm
from kvgraft.cli.plotting import add_plot_option, check_plot, draw_plot
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from _typeshed import DataclassInstance

    from kvgraft.bench.journal import Journal
    from kvgraft.engine import LLM

_DATA = "../shared/data/dev"
_LEAST_DOCUMENT = 64
_CHOOSES_ROWS = frozenset({"names", "suites", "kinds", "clock", "lengths"})
"""Settings that choose among figures and change none; both clocks are kept."""


class SuiteTable(Protocol):
    """A module of `kvgraft.bench.suite` that measures a table."""

    @property
    def TABLE(self) -> str:
        """Its name on the command line."""

    @property
    def TITLE(self) -> str:
        """Its heading."""

    @property
    def KEY(self) -> Sequence[str]:
        """Fields that name a record of its journal."""

    def measure(
        self,
        llm: LLM,
        settings: Any,  # noqa: ANN401 - each table has its own
        journal: Journal,
        advance: Callable[[], object],
        /,
    ) -> list[dict[str, Any]]:
        """Return its rows; `advance` is called once per step."""


def add_sample_options(parser: argparse.ArgumentParser, *, max_prompt_tokens: int) -> None:
    """Add where packs lie, which of their requests are measured, and what `add_journal_options` adds."""
    add = parser.add_argument
    add("--data", default=_DATA, metavar="DIR", help=f"where packs lie (default {_DATA})")
    add("--limit", type=int, default=12, metavar="N", help="requests per row that are measured (default 12)")
    add(
        "--max-prompt-tokens",
        type=int,
        default=max_prompt_tokens,
        metavar="N",
        help=f"longer prompts are not measured (default {max_prompt_tokens})",
    )
    add_journal_options(parser)


def add_journal_options(parser: argparse.ArgumentParser) -> None:
    """Add the seed, the journal and the forms of the output."""
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="chooses what is drawn and the resampling (default 0)")
    add("--journal", metavar="FILE", help="keep what is measured there, and go on from it")
    add("--json", action="store_true", help="print a JSON object instead of a table")
    add_plot_option(parser)


def add_clock_option(parser: argparse.ArgumentParser) -> None:
    """Add by which clock times are taken."""
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the process's own time, for a machine that does other work",
    )


def check_lengths(args: argparse.Namespace) -> None:
    """Refuse `--lengths` that leave no document behind `--shift` new tokens."""
    least = args.shift + _LEAST_DOCUMENT
    if min(args.lengths) < least:
        raise ConfigError(f"--lengths must be at least --shift + {_LEAST_DOCUMENT} = {least}")


def check_at_least(args: argparse.Namespace, **lowest: int) -> None:
    """Refuse numbers below these."""
    for name, least in lowest.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, not {getattr(args, name)}")


def load_table_llm(args: argparse.Namespace) -> LLM:
    """Load the model, with all K/V of window layers kept while it is measured.

    Raises:
        ConfigError: Its K/V cannot be moved, or what was asked for cannot be written.
    """
    from kvgraft.bench.fidelity.one_space import in_one_space

    check_plot(args)
    llm = load_llm(in_one_space(engine_config(args)), shows_stages=not args.json)
    if llm.graft_refusal is not None:
        raise ConfigError(f"K/V of model {llm.loaded.name} cannot be moved ({llm.graft_refusal}); choose another model")
    return llm


def measure_table(
    args: argparse.Namespace,
    table: SuiteTable,
    settings: DataclassInstance,
    llm: LLM,
    *,
    total: tuple[int, str],
    absent: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Measure a table, going on from its journal, and print it.

    Args:
        args: Of the command.
        table: The module that measures it.
        settings: What it measures.
        llm: With which model.
        total: How many steps that takes, and what they are called.
        absent: Rows that cannot be measured here.

    Returns:
        The rows.
    """
    journal = _open_journal(args, table, settings, llm)
    with progress(*total) as advance:
        rows = table.measure(llm, settings, journal, advance)
    _print_table(args, llm, settings, rows, table=table.TABLE, title=table.TITLE, absent=absent)
    return rows


def _open_journal(args: argparse.Namespace, table: SuiteTable, settings: DataclassInstance, llm: LLM) -> Journal:
    """Open the journal; it goes on with the same code, model and settings, whatever rows and clock are chosen."""
    from kvgraft import __version__
    from kvgraft.bench.fidelity.meta import commit
    from kvgraft.bench.journal import Journal

    arguments = {
        "table": table.TABLE,
        **{name: value for name, value in dataclasses.asdict(settings).items() if name not in _CHOOSES_ROWS},
        "policy": llm.policy.name,
        "fingerprint": llm.loaded.fingerprint,
        "num_slots": llm.usage().total,
        "code": commit() or __version__,
    }
    return Journal(Path(args.journal) if args.journal else None, json.loads(json.dumps(arguments)), table.KEY)


def _print_table(
    args: argparse.Namespace,
    llm: LLM,
    settings: DataclassInstance,
    rows: Sequence[Mapping[str, Any]],
    *,
    table: str,
    title: str,
    absent: Sequence[str] = (),
) -> None:
    """Print the table as JSON, or a line per row of what is known; draw it where that is asked for."""
    from kvgraft.bench.suite.page import panels_of

    told = _told(llm, settings, absent)
    result = {"table": table, "title": title, "settings": told, "rows": list(rows)}
    draw_plot(args, lambda: panels_of(table, {"result": result}), f"{title}: {llm.loaded.name}")
    if args.json:
        print(json.dumps(result, indent=1))
        return
    for row in rows:
        print("  ".join(f"{name} {_short(value)}" for name, value in row.items() if value is not None))
    for name in absent:
        print(f"{name}: not in {told['data']}, left out")


def _told(llm: LLM, settings: DataclassInstance, absent: Sequence[str]) -> dict[str, Any]:
    """Settings of the table and of the engine."""
    return dataclasses.asdict(settings) | {
        "model": llm.loaded.name,
        "dtype": str(next(llm.adapter.model.parameters()).dtype).removeprefix("torch."),
        "policy": llm.policy.name,
        "recompute_ratio": llm.policy.recompute_ratio,
        "correction": llm.config.correction,
        "absent": list(absent),
    }


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
