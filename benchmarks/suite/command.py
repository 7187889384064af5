"""Measure one table: its options, its model, its journal and what it prints."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft import __version__
from kvgraft.bench.fidelity.meta import commit
from kvgraft.bench.fidelity.one_space import in_one_space
from kvgraft.bench.journal import Journal
from kvgraft.cli.model_options import add_model_options, engine_config, load_llm
from kvgraft.cli.plotting import add_plot_option, check_plot, draw_plot
from kvgraft.cli.progress import progress
from kvgraft.errors import ConfigError

from .page import panels_of
from .settings import add_options, settings_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from kvgraft.engine import LLM

    from .measured import MeasuredTable
    from .settings import TableSettings

_CHOOSES_ROWS = frozenset({"names", "suites", "kinds", "clock", "lengths", "minutes"})
"""Settings that choose among figures and change none; the journal keeps the times of both clocks."""


def add_table_options(parser: argparse.ArgumentParser, table: MeasuredTable) -> None:
    """Add the settings of the table, the journal, the forms of the output and the model."""
    add_options(parser, table.settings)
    parser.add_argument("--journal", metavar="FILE", help="keep what is measured there, and go on from it")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of a table")
    add_plot_option(parser)
    add_model_options(parser)


def run_table(args: argparse.Namespace, table: MeasuredTable) -> int:
    """Measure a table and print it; 1 if the K/V of a wrong token were reused."""
    settings = settings_of(args, table.settings)
    check_plot(args)
    llm = table.prepare(_load(args), settings)
    journal = _open_journal(args, table, settings, llm)
    with progress(settings.num_steps, "steps") as advance:
        rows = table.measure(llm, settings, journal, advance)
    result = {"table": table.name, "title": table.title, "settings": _facts(llm, settings), "rows": rows}
    draw_plot(args, lambda: panels_of({"result": result}), f"{table.title}: {llm.loaded.name}")
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        _print_rows(result)
    return int(any(row.get("wrong_tokens") for row in rows))


def _load(args: argparse.Namespace) -> LLM:
    """Load the model, with all K/V of window layers kept while it is measured.

    Raises:
        ConfigError: Its K/V cannot be moved.
    """
    llm = load_llm(in_one_space(engine_config(args)), shows_stages=not args.json)
    if llm.graft_refusal is not None:
        raise ConfigError(f"K/V of model {llm.loaded.name} cannot be moved ({llm.graft_refusal}); choose another model")
    return llm


def _open_journal(args: argparse.Namespace, table: MeasuredTable, settings: TableSettings, llm: LLM) -> Journal:
    """Open the journal; it goes on with the same code, model and settings, for any choice of rows and clock."""
    arguments = {
        "table": table.name,
        **{name: value for name, value in dataclasses.asdict(settings).items() if name not in _CHOOSES_ROWS},
        "policy": llm.policy.name,
        "fingerprint": llm.loaded.fingerprint,
        "num_slots": llm.usage().total,
        "code": commit() or __version__,
    }
    return Journal(Path(args.journal) if args.journal else None, json.loads(json.dumps(arguments)), table.key)


def _facts(llm: LLM, settings: TableSettings) -> dict[str, Any]:
    """Settings of the table and of the engine, as a record keeps them."""
    return dataclasses.asdict(settings) | {
        "model": llm.loaded.name,
        "dtype": str(next(llm.adapter.model.parameters()).dtype).removeprefix("torch."),
        "policy": llm.policy.name,
        "recompute_ratio": llm.policy.recompute_ratio,
        "correction": llm.config.correction,
        "repair": llm.config.repair,
        "repair_below_margin": llm.config.repair_below_margin,
        "absent": list(settings.absent),
    }


def _print_rows(result: Mapping[str, Any]) -> None:
    for row in result["rows"]:
        print("  ".join(f"{name} {_short(value)}" for name, value in row.items() if value is not None))
    for name in result["settings"]["absent"]:
        print(f"{name}: not in {result['settings']['data']}, left out")


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
