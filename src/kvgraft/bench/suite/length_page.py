"""Table T1 as Markdown. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Lines, Series
from kvgraft.bench.suite.cells import number, share, table, with_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.panels import Panel

    Row = Mapping[str, Any]

_TIMES = ("prompt", "cold", "miss", "overhead of a miss", "`none`", "default", "same prompt again")
_RATIOS = (
    "prompt",
    "`none`: computed",
    "speed-up",
    "of the bound",
    "default: computed",
    "speed-up",
    "of the bound",
    "same prompt again",
)
_CLAIMED = {4096: 4.9, 8192: 7.1, 16384: 10.0}
"""Speed-up by context, README of semblend 0.3.25: Qwen2.5-7B-AWQ on an A10G, vLLM 0.14.1 with LMCache, 15 prompts a cell."""

_SAME_LENGTH = 0.03
"""By which share lengths may differ: a model of 8,192 tokens takes prompts of 8,000."""


def render(record: Mapping[str, Any]) -> str:
    """Return the tables and what belongs to them.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    settings, rows = result["settings"], result["rows"]
    return "\n\n".join(
        [
            f"{settings['model']}, {settings['dtype']}, {settings['rounds']} rounds; in each, one after another: nothing "
            "known, with reuse on (*miss*) and off (*cold*); the document known, behind "
            f"{settings['shift']} new tokens, with nothing computed again (`none`) and as by default "
            f"(`{settings['policy']}` at {settings['recompute_ratio']:.0%}, `{settings['correction']}`); and *the same "
            "prompt again*, an exact hit, which bounds what reuse can reach. Milliseconds from admission to the first "
            "token, medians and (p95).",
            table(_TIMES, [_times(row) for row in rows]),
            "Speed-ups are medians of cold over medians of the hit, with 95 % bootstrap intervals over rounds. The *bound* "
            "is what full prefill takes of operations over what the computed positions take.",
            table(_RATIOS, [_ratios(row) for row in rows]),
            *filter(None, [_claims(rows)]),
            "**What this does not show.** A queue, other requests, tokenising or HTTP. Real text: tokens are random, and "
            "every document is found whole; what a hit does to the answer is in the other tables. A GPU: here a prefill is "
            "slow, so that a saved token is worth more, and what a graft costs beside it weighs less. Few rounds make a p95 "
            "the slowest of them.",
        ]
    )


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = record["result"]["rows"]
    lengths = [row["length"] for row in rows]
    names = {"cold": "cold", "default": "default policy", "none": "none computed again", "repeat": "same prompt again"}
    times = [Series.of(label, rows, f"{name}_ms") for name, label in names.items()]
    reached = [
        Series.of(label, rows, f"{name}_of_bound_share", 100)
        for name, label in names.items()
        if name in ("default", "none")
    ]
    return [
        Lines("time to first token, ms", "prompt tokens", lengths, times, is_log=True),
        Bars("speed-up, % of the FLOP bound", [f"{length:,}" for length in lengths], reached, mark=100),
    ]


def _times(row: Row) -> list[str]:
    def time(name: str) -> str:
        return f"{number(row[f'{name}_ms'], ',.0f')} ({number(row[f'{name}_p95_ms'], ',.0f')})"

    overhead = with_range(row, "miss_overhead_percent", "+.1f", " %")
    return [f"{row['length']:,}", time("cold"), time("miss"), overhead, time("none"), time("default"), time("repeat")]


def _ratios(row: Row) -> list[str]:
    cells = [f"{row['length']:,}"]
    for name in ("none", "default"):
        cells += [
            f"{row[f'{name}_computed_tokens']:,}",
            with_range(row, f"{name}_speedup_ratio", ".1f", "x"),
            f"{share(row[f'{name}_of_bound_share'])} of {number(row[f'{name}_bound_ratio'], '.1f')}x",
        ]
    return [*cells, with_range(row, "repeat_speedup_ratio", ".1f", "x")]


def _claims(rows: Sequence[Row]) -> str:
    """A line per length of which the other side says something too; empty if there is none."""
    lines = []
    for length, claim in _CLAIMED.items():
        for row in rows:
            if abs(row["length"] / length - 1) < _SAME_LENGTH:
                ours = [with_range(row, f"{name}_speedup_ratio", ".1f", "x") for name in ("none", "default")]
                lines.append([f"{length:,}", f"{claim:.1f}x", *ours])
    if not lines:
        return ""
    return (
        "SemBlend's are of a 7B model on an A10G, of prompts whose donor matches, and fill positions with the K/V of "
        "other tokens (T7); it names 12,288 and 24,576 tokens, too (8.7x and 12.3x).\n\n"
        + table(("prompt", "SemBlend says", "ours, `none`", "ours, default"), lines)
    )
