"""Table T4 as Markdown. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Series
from kvgraft.bench.suite.cells import number, share, table, with_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.bench.panels import Panel

    Row = Mapping[str, Any]

_COLUMNS = (
    "agent",
    "turns",
    "tokens",
    "exact prefix",
    "ours",
    "bound",
    "off ms",
    "exact ms",
    "ours ms",
    "healed ms",
    "exact: speed-up",
    "ours: speed-up",
    "healed: speed-up",
    "tokens healed",
    "same first token",
)
_CLOCKS = {"cpu": "processor time of the process, on a machine that did other work", "wall": "wall time"}


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what belongs to it.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    settings, rows = result["settings"], result["rows"]
    return "\n\n".join(
        [
            f"A scripted coding agent over the standard library's sources (`kvgraft bench pack agent`), up to "
            f"{settings['turns']} turns of each kind, {settings['model']}, {settings['dtype']}, `{settings['policy']}` with "
            f"`{settings['correction']}`. *exact prefix* and *ours* are shares of prompt tokens that the engine reused, "
            "*bound* is what is found at any offset of an earlier turn, in runs of "
            f"{settings['min_run']} tokens. *growing* changes nothing between turns: an exact prefix is all that is needed "
            "there. *healed* is ours with time between the turns, as an engine has while an agent's tools run: what was "
            "reused approximately is computed again then (*tokens healed*, per turn), and the next turn's prefix is exact. "
            f"Times are {_CLOCKS[settings['clock']]}, medians; a speed-up is that of all turns of a row together, "
            "with 95 % intervals over turns.",
            table(_COLUMNS, [_line(row) for row in rows]),
            "SemBlend says nothing of agents; its scripts for conversations number the tokens of every text from 0 on, so "
            "that all documents share their ids, and show no reuse of text. Users report what is measured here: hit rates of "
            "99 % that fall to 2 % because of a clock in the first line, and minutes of prefill per turn behind a "
            "compaction.",
            "Without time between turns (*ours*) what stands behind a graft stays approximate, and every later turn pays for "
            "looking at it and computing a part of it again. So a beginning that two turns reused is computed in full by the "
            "next one, and a small graft in a prompt that is an exact prefix for the most part is not made "
            "([why](adr/0014-renting-and-buying.md)). Where *exact* is still ahead of *ours*, these turns paid for it. "
            "`kvgraft serve` heals whenever nobody waits (setting `heal`): that is *healed*.",
            "**What this does not show.** What the model would have done: answers are scripted, so that every mode is asked "
            "the same. Long sessions: prompts of real agents are ten times as long, where a prefill that is saved is worth "
            "more. Whether the answers are as good: the first token is compared, no more; T3 and T6 say what reuse does to "
            "answers.",
        ]
    )


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    latest = {row["kind"]: row for row in record["result"]["rows"]}
    rows = list(latest.values())
    names = [f"{row['kind']}, turns {row['turns']}" for row in rows]
    modes = {"exact prefix": "exact", "ours": "graft", "ours, healed": "healed"}
    shares = [Series.of(label, rows, f"{name}_share", 100) for label, name in modes.items()]
    faster = [Series.of(label, rows, f"{name}_speedup_ratio") for label, name in modes.items()]
    return [
        Bars("prompt tokens reused, %", names, [*shares, Series.of("bound", rows, "bound_share", 100)]),
        Bars("speed-up of the first token", names, faster, mark=1),
    ]


def _line(row: Row) -> list[str]:
    times = [number(row[f"{name}_ms"], ",.0f") for name in ("off", "exact", "graft", "healed")]
    shares = [share(row[name]) for name in ("exact_share", "graft_share", "bound_share")]
    speedups = [with_range(row, f"{name}_speedup_ratio", ".1f", "x") for name in ("exact", "graft", "healed")]
    tokens = number(row["mean_tokens"], ",.0f")
    healing = number(row["mean_healing_tokens"], ",.0f")
    return [
        row["kind"],
        row["turns"],
        tokens,
        *shares,
        *times,
        *speedups,
        healing,
        share(row["same_first_token_share"]),
    ]
