"""Table T6: the perplexity ratio, and what it hides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import NamedPoint, Points

from ..methods import ALL_SUITES, OFF, SUBSTITUTED, VERIFIED
from .cells import NOTHING, Result, Row, lines, number, ranged, ranged_share, share, table, text
from .datasets import remedy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.bench.panels import Panel

_SAYS = (
    "first perplexity ratios 1.006, 1.012, 1.025 and 1.007; in 0.3.25 "
    "1.018-1.054 (XSum), 1.011-1.049 (CNN/DailyMail), 0.987-1.037 (WikiHow), 0.958-1.064 (MultiNews), "
    "1.140-1.198 (SAMSum), and 87-100 % faithful by a model's judgement"
)
"""READMEs of an early SemBlend and of 0.3.25."""
_LOOGLE = "loogle"


def _method(row: Row) -> str:
    return f"**{row['method']}**" if row["method"] in (OFF, SUBSTITUTED) else str(row["method"])


def _stale(row: Row) -> str:
    return f"{share('stale_share')(row)} of {row['stale_asked']}" if row["stale_asked"] else NOTHING


_RATIO = ranged("perplexity_ratio", ".3f")
_COLUMNS = (
    ("answered by", _method),
    ("n", text("requests")),
    ("reused", share("reused_share")),
    ("perplexity ratio", _RATIO),
    ("mean KL", ranged("mean_kl", ".4f")),
    ("first token flips", ranged_share("first_flip_share")),
    ("32 tokens equal", ranged_share("greedy_equal_share")),
    ("stale answers", _stale),
)
_SCORES = (
    ("suite", text("suite")),
    ("answered by", _method),
    ("n", text("scored")),
    ("word F1", number("score", ".3f")),
    ("difference to full prefill", ranged("score_difference", "+.3f")),
    ("holds a right answer", share("contains_share")),
    ("difference", ranged_share("contains_difference")),
    ("denies", share("denies_share")),
    ("stale", _stale),
)


def _by_suite(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of every suite, those of all suites first."""
    suites = sorted(dict.fromkeys(row["suite"] for row in rows), key=lambda name: name != ALL_SUITES)
    return {suite: [row for row in rows if row["suite"] == suite] for suite in suites}


def _suites(result: Result) -> str:
    """Rows of all suites together; the record has those of each."""
    return table(_COLUMNS, next(iter(_by_suite(result["rows"]).values())))


def _scores(result: Result) -> str:
    """Scores of every suite that has right answers, of full prefill, our own setting and the baseline; empty for none."""
    shown = (OFF, own_method(result["settings"]), SUBSTITUTED)
    rows = [row for row in result["rows"] if row["method"] in shown and row["suite"] != ALL_SUITES]
    compared = [row for row in rows if row["scored"] and "score_difference" in row]
    return table(_SCORES, compared) if compared else ""


def _claims(result: Result) -> str:
    rows = next(iter(_by_suite(result["rows"]).values()))
    theirs = [_figures(row) for row in rows if row["method"] == SUBSTITUTED] + [
        f"{share('stale_share')(row)} of its answers to `{row['suite']}` are stale"
        for row in result["rows"]
        if row["method"] == SUBSTITUTED and row["stale_asked"] and row["suite"] != ALL_SUITES
    ]
    ours = [_figures(row) for row in rows if row["method"] == own_method(result["settings"])]
    ours += [
        f"verified: {share('greedy_equal_share')(row)} of answers equal" for row in rows if row["method"] == VERIFIED
    ]
    head = ("claim", "SemBlend says", "a similar text's K/V, measured", "ours, measured")
    said = [["quality is kept", _SAYS, "; ".join(theirs), "; ".join(ours)]]
    return lines(head, [*said, ["LooGLE, scores without and with reuse", "84.50 and 84.32", *_loogle(result)]])


def _loogle(result: Result) -> tuple[str, str]:
    """Scores on LooGLE of a similar text's K/V and of the methods that the claim is about, or how to measure them."""
    scores = {row["method"]: number("score", ".3f")(row) for row in result["rows"] if row["suite"] == _LOOGLE}
    if not scores:
        return NOTHING, remedy("LooGLE", _LOOGLE, "quality --suites")
    ours = [f"{name}: {scores[name]}" for name in (OFF, own_method(result["settings"])) if name in scores]
    return scores.get(SUBSTITUTED, NOTHING), ", ".join(ours)


def own_method(settings: Row) -> str:
    """Return the engine's own setting, as its row is named."""
    ratio = f":{settings['recompute_ratio']:g}" if settings["recompute_ratio"] else ""
    correction = "" if settings["correction"] == "none" else f"+{settings['correction']}"
    margin = settings.get("repair_below_margin")  # older records have none
    when = "@after" + (f"~{margin:g}" if margin else "") if settings.get("repair") == "after" else ""
    return f"{settings['policy']}{ratio}{correction}{when}"


def _figures(row: Row) -> str:
    return (
        f"{row['method']}: perplexity ratio {_RATIO(row)}, KL {number('mean_kl', '.4f')(row)}, first tokens that flip "
        f"{share('first_flip_share')(row)}"
    )


BLOCKS = {"suites": _suites, "scores": _scores, "claims": _claims}


def panels(result: Result) -> list[Panel]:
    """KL over the perplexity ratio and over reuse, of all suites or of the first."""
    suite, rows = next(iter(_by_suite([row for row in result["rows"] if row["mean_kl"] is not None]).items()))
    return [
        _points(f"what the perplexity ratio hides ({suite})", "perplexity ratio", "perplexity_ratio", 1, rows),
        _points(f"fidelity and reuse ({suite})", "reused, %", "reused_share", 100, rows),
    ]


def _points(title: str, label: str, field: str, factor: float, rows: Sequence[Row]) -> Points:
    groups = {
        row["method"]: [NamedPoint(row["method"], factor * row[field], row["mean_kl"], row["method"] == SUBSTITUTED)]
        for row in rows
        if row[field] is not None
    }
    return Points(title, label, "mean KL to full prefill, nats", groups, y_linear_below=1e-3)
