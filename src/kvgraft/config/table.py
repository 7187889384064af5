"""Settings as users read them: values in words, and the table of docs/reference/settings.md."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvgraft.config.engine import MODEL, RISK, SCHEDULING, EngineConfig
from kvgraft.config.reuse import MEMORY, REUSE
from kvgraft.config.server import SERVER, ServerConfig
from kvgraft.config.setting import rule_of

_GROUPS = (MODEL, REUSE, RISK, MEMORY, SCHEDULING, SERVER)
_HEAD = ("| setting | default | meaning |", "|---|---|---|")
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def default_text(field: dataclasses.Field[Any]) -> str:
    """Write the default of a setting as a person would: sizes with their unit, `-` for nothing."""
    value = field.default
    if rule_of(field).size and isinstance(value, int):
        for factor, unit in _UNITS:
            if value and value % factor == 0:
                return f"{value // factor}{unit}"
    if isinstance(value, bool):
        return str(value).lower()
    return "-" if value in ("", ()) else str(value)


def settings_table() -> str:
    """Return the Markdown table of all settings of engine and server, grouped."""
    lines = list(_HEAD)
    for group, fields in grouped_settings().items():
        lines += [f"| **{group}** | | |", *map(_row, fields)]
    return "\n".join(lines) + "\n"


def grouped_settings() -> dict[str, list[dataclasses.Field[Any]]]:
    """Return all settings under their headings; what a server adds to the engine comes first in each."""
    engine = EngineConfig.rules()
    fields = sorted(dataclasses.fields(ServerConfig), key=lambda field: field.name in engine)
    return {group: [field for field in fields if rule_of(field).group == group] for group in _GROUPS}


def _row(field: dataclasses.Field[Any]) -> str:
    return f"| `{field.name}` | `{default_text(field)}` | {_meaning(field)} |"


def _meaning(field: dataclasses.Field[Any]) -> str:
    rule = rule_of(field)
    return rule.help + (f" ({', '.join(f'`{choice}`' for choice in rule.choices)})" if rule.choices else "")
