"""`kvgraft config`: effective settings, and whether a file is right."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from kvgraft.cli.model_options import add_settings, resolve_settings
from kvgraft.cli.parser import show_first
from kvgraft.config import file_errors, grouped_settings, rule_of
from kvgraft.config.setting import without_password

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from kvgraft.config import Resolved, ServerConfig

_MASK = "***"


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser("config", help="show or check settings", description="Show or check settings.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    show = actions.add_parser(
        "show",
        help="print the effective settings and where each comes from",
        description="Print the settings that `kvgraft serve` with the same options would have. Flags win over KVGRAFT_* "
        "variables, variables over the file, the file over defaults. API keys are masked.",
    )
    show.add_argument("--format", choices=("yaml", "json"), default="yaml", help="how to print (default yaml)")
    show.add_argument("--changed", action="store_true", help="print only what differs from its default")
    add_settings(show)
    show_first(show, "--format", "--changed", "--config", "--model", "--port")
    show.set_defaults(run=run_show)
    validate = actions.add_parser(
        "validate",
        help="check a file",
        description="Check a YAML or JSON file of settings; prints each error in one line. Exit code 2 if there are any.",
    )
    validate.add_argument("file", metavar="FILE")
    validate.set_defaults(run=run_validate)


def run_show(args: argparse.Namespace) -> int:
    """Print the settings."""
    resolved = resolve_settings(args)
    for warning in resolved.warnings:
        print(f"kvgraft: {warning}", file=sys.stderr)
    values = _values(resolved)
    if args.changed:
        values = {name: values[name] for name in _changed(resolved)}
    print((_as_json if args.format == "json" else _as_yaml)(values, resolved.origins))
    return 0


def run_validate(args: argparse.Namespace) -> int:
    """Check the file."""
    errors = file_errors(args.file)
    for error in errors:
        print(f"kvgraft: {error}", file=sys.stderr)
    if errors:
        return 2
    print(f"{args.file}: ok")
    return 0


def _values(resolved: Resolved[ServerConfig]) -> dict[str, object]:
    """Return all values in the order of `--help`, secrets and passwords masked."""
    values = {}
    for field in (field for fields in grouped_settings().values() for field in fields):
        value = getattr(resolved.config, field.name)
        if rule_of(field).url:
            value = without_password(value)
        values[field.name] = _masked(value) if rule_of(field).secret else value
    return values


def _changed(resolved: Resolved[ServerConfig]) -> list[str]:
    """Names of settings that differ from their default; what is given as it is by default does not."""
    fields = [field for fields in grouped_settings().values() for field in fields]
    return [field.name for field in fields if getattr(resolved.config, field.name) != field.default]


def _as_json(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    return json.dumps({name: {"value": value, "from": origins[name]} for name, value in values.items()}, indent=1)


def _as_yaml(values: Mapping[str, object], origins: Mapping[str, str]) -> str:
    if not values:
        return "# every setting has its default"
    lines = {name: f"{name}: {json.dumps(value)}" for name, value in values.items()}
    width = max(map(len, lines.values()))
    return "\n".join(f"{line:{width}s}  # {origins[name]}" for name, line in lines.items())


def _masked(secret: str | Sequence[str]) -> str | list[str]:
    """Say that there is a secret, or how many, and nothing of what it is."""
    if isinstance(secret, str):
        return _MASK if secret else ""
    return [_MASK] * len(secret)
