"""Table T1: time to first token by length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Lines, Series

from .cells import NOTHING, Cell, Result, Row, lines, number, ranged, share, table, time

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel

_CLAIMED = {4096: ("2.3x", "4.9x"), 8192: ("3.9x", "7.1x"), 16384: ("6.7x", "10.0x"), 32768: ("12.0x", NOTHING)}
"""Speed-up by context: READMEs of an early semblend, and of 0.3.25, which has Qwen2.5-7B-AWQ on an A10G, vLLM 0.14.1 with
LMCache, 15 prompts a cell."""
_SAME_LENGTH = 0.03
"""Share by which lengths may differ: a model of 8,192 tokens takes prompts of 8,000."""

_PROMPT = ("prompt", number("length", ","))
_TIMES = (
    _PROMPT,
    ("rounds", number("rounds")),
    ("cold", time("cold")),
    ("miss", time("miss")),
    ("`none`", time("none")),
    ("default", time("default")),
    ("same prompt again", time("repeat")),
)


def _speedup(name: str) -> Cell:
    return ranged(f"{name}_speedup_ratio", ".1f", "x")


def _of_bound(name: str) -> Cell:
    return lambda row: f"{share(f'{name}_of_bound_share')(row)} of {number(f'{name}_bound_ratio', '.1f', 'x')(row)}"


_RATIOS = (
    _PROMPT,
    ("`none`: computed", number("none_computed_tokens", ",")),
    ("speed-up", _speedup("none")),
    ("of the bound", _of_bound("none")),
    ("default: computed", number("default_computed_tokens", ",")),
    ("speed-up", _speedup("default")),
    ("same prompt again", _speedup("repeat")),
)


def _claims(result: Result) -> str:
    """A line per length that both sides have; empty if there is none."""
    found = [
        [f"{length:,}", *claimed, _speedup("none")(row), _speedup("default")(row)]
        for length, claimed in _CLAIMED.items()
        for row in result["rows"]
        if abs(row["length"] / length - 1) < _SAME_LENGTH
    ]
    head = ("prompt", "SemBlend says, first", "and in 0.3.25", "ours, `none`", "ours, default")
    return lines(head, found) if found else ""


BLOCKS = {
    "times": lambda result: table(_TIMES, result["rows"]),
    "ratios": lambda result: table(_RATIOS, result["rows"]),
    "claims": _claims,
}


def panels(result: Result) -> list[Panel]:
    """Times over lengths, and speed-ups beside their bound."""
    rows: list[Row] = result["rows"]
    lengths = [row["length"] for row in rows]
    names = {"cold": "cold", "default": "default policy", "none": "none computed again", "repeat": "same prompt again"}
    times = [Series.of(label, rows, f"{name}_ms") for name, label in names.items()]
    reached = [Series.of(names["none"], rows, "none_of_bound_share", 100)]
    return [
        Lines("time to first token, ms", "prompt tokens", lengths, times, is_log=True),
        Bars("speed-up, % of the FLOP bound", [f"{length:,}" for length in lengths], reached, mark=100),
    ]
