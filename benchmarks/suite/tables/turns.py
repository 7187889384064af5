"""Table T4: conversations and agents, turn by turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import NOTHING, Result, Row, number, ranged, share, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel


def _answers(row: Row) -> str:
    """Speed-ups of whole answers; records of answers of one token have none."""
    ratios = [row.get(f"{name}_answer_speedup_ratio") for name in ("exact", "graft", "healed")]
    return ", ".join(NOTHING if ratio is None else f"{ratio:.1f}x" for ratio in ratios)


_COLUMNS = (
    ("agent", text("kind")),
    ("turns", text("turns")),
    ("tokens", number("mean_tokens")),
    ("exact prefix", share("exact_share")),
    ("ours", share("graft_share")),
    ("bound", share("bound_share")),
    ("exact: speed-up", ranged("exact_speedup_ratio", ".1f", "x")),
    ("ours: speed-up", ranged("graft_speedup_ratio", ".1f", "x")),
    ("ours, of exact's time", ranged("graft_of_exact_ratio", ".2f")),
    ("healed: speed-up", ranged("healed_speedup_ratio", ".1f", "x")),
    ("exact, ours, healed: of 8 tokens", _answers),
    ("tokens healed", number("mean_healing_tokens")),
)


def _last_turns(result: Result) -> list[Row]:
    """The last turns of each kind; the record has the first ones."""
    return list({row["kind"]: row for row in result["rows"]}.values())


BLOCKS = {"turns": lambda result: table(_COLUMNS, _last_turns(result))}


def panels(result: Result) -> list[Panel]:
    """Reuse and speed-up of the last turns of each kind."""
    rows = _last_turns(result)
    names = [f"{row['kind']}, turns {row['turns']}" for row in rows]
    modes = {"exact prefix": "exact", "ours": "graft", "ours, healed": "healed"}
    shares = [Series.of(label, rows, f"{name}_share", 100) for label, name in modes.items()]
    faster = [Series.of(label, rows, f"{name}_speedup_ratio") for label, name in modes.items()]
    return [
        Bars("prompt tokens reused, %", names, [*shares, Series.of("bound", rows, "bound_share", 100)]),
        Bars("speed-up of the first token", names, faster, mark=1),
    ]
