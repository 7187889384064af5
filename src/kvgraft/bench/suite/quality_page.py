"""Table T6 as Markdown, with what others say of quality and what the table does not show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Point, Points
from kvgraft.bench.suite.cells import NOTHING, number, share, table, with_range
from kvgraft.bench.suite.methods import ALL_SUITES, OFF, SUBSTITUTED, VERIFIED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.panels import Panel

    Row = Mapping[str, Any]

_COLUMNS = (
    "answered by",
    "n",
    "reused",
    "perplexity ratio",
    "mean KL",
    "median KL",
    "first token flips",
    "32 tokens equal",
    "score",
    "right answer in it",
    "stale answers",
)
_SAYS = (
    "perplexity ratio 1.018-1.054 (XSum), 1.011-1.049 (CNN/DailyMail), 0.987-1.037 (WikiHow), 0.958-1.064 (MultiNews), "
    "1.140-1.198 (SAMSum), and 87-100 % faithful by a model's judgement"
)
"""README of SemBlend 0.3.25."""


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what belongs to it.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    rows, settings = result["rows"], result["settings"]
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    suites.sort(key=lambda name: name != ALL_SUITES)
    parts = [_about(settings)]
    for suite in suites:
        chosen = [row for row in rows if row["suite"] == suite]
        parts += [
            f"**`{suite}`**" if suite != ALL_SUITES else "**All suites**",
            table(_COLUMNS, [_line(row) for row in chosen]),
        ]
    return "\n\n".join([*parts, _claims(rows, suites[0], _own(settings)), _NOT_SHOWN])


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = [row for row in record["result"]["rows"] if row["mean_kl"] is not None]
    suites = list(dict.fromkeys(row["suite"] for row in rows))
    suite = ALL_SUITES if ALL_SUITES in suites else suites[0]
    about = f"what the perplexity ratio hides ({suite})"
    return [
        _points(about, "perplexity ratio", "perplexity_ratio", 1, [row for row in rows if row["suite"] == suite]),
        _points(
            f"fidelity and reuse ({suite})", "reused, %", "reused_share", 100, [r for r in rows if r["suite"] == suite]
        ),
    ]


def _points(title: str, label: str, field: str, factor: float, rows: Sequence[Row]) -> Points:
    groups = {
        row["method"]: [Point(row["method"], factor * row[field], row["mean_kl"], row["method"] == SUBSTITUTED)]
        for row in rows
        if row[field] is not None
    }
    return Points(title, label, "mean KL to full prefill, nats", groups, y_linear_below=1e-3)


def _line(row: Row) -> list[str]:
    return [
        f"**{row['method']}**" if row["method"] in (OFF, SUBSTITUTED) else str(row["method"]),
        str(row["requests"]),
        share(row["reused_share"]),
        with_range(row, "perplexity_ratio", ".3f"),
        with_range(row, "mean_kl", ".4f"),
        number(row["median_kl"], ".4f"),
        share(row["first_flip_share"]),
        share(row["greedy_equal_share"]),
        number(row["score"], ".3f"),
        share(row["contains_share"]),
        NOTHING if not row["stale_asked"] else f"{share(row['stale_share'])} of {row['stale_asked']}",
    ]


def _about(settings: Row) -> str:
    absent = f" Not on the machine and left out: {', '.join(settings['absent'])}." if settings["absent"] else ""
    return (
        f"{settings['model']}, {settings['dtype']}; per suite up to {settings['limit']} prompts of at most "
        f"{settings['max_prompt_tokens']:,} tokens (seed {settings['seed']}), answered by every method. The *perplexity "
        "ratio* is that of the perplexity which the model gives its own greedy answer with reuse to that of its own answer "
        "without, as it is advertised. The other columns compare with full prefill by the model's own forward pass: KL "
        "over its 32 greedy tokens, first tokens that are others, answers that are equal; a score is word F1, of `lines` "
        "whether the value is right; an answer is stale that is right for the text read before and not for this one. Another "
        f"number format (of {settings['noise_floor']} requests per suite) is the floor. *{SUBSTITUTED}* is a cache that goes "
        "by similarity, rebuilt: the text most like the prompt, by the cosine of token counts (0.60 at least, SemBlend's "
        f"threshold), stands in for everything in front of the question.{absent}"
    )


def _claims(rows: Sequence[Row], suite: str, own: str) -> str:
    known = {row["method"]: row for row in rows if row["suite"] == suite}
    stale = [row for row in rows if row["method"] == SUBSTITUTED and row["stale_asked"]]
    measured = [_told(known[name]) for name in (SUBSTITUTED,) if name in known]
    measured += [
        f"{share(row['stale_share'])} of its answers to `{row['suite']}` are stale"
        for row in stale
        if row["suite"] != ALL_SUITES
    ]
    ours = [_told(known[own])] if own in known else []
    ours += [
        f"verified: {share(known[name]['greedy_equal_share'])} of answers equal"
        for name in (VERIFIED,)
        if name in known
    ]
    return table(
        ("claim", "SemBlend says", "a similar text's K/V, measured", "ours, measured"),
        [["quality is kept", _SAYS, "; ".join(measured), "; ".join(ours)]],
    )


def _own(settings: Row) -> str:
    """The engine's own setting, as its row is named."""
    ratio = f":{settings['recompute_ratio']:g}" if settings["recompute_ratio"] else ""
    return str(settings["policy"]) + ratio + ("" if settings["correction"] == "none" else f"+{settings['correction']}")


def _told(row: Row) -> str:
    return (
        f"{row['method']}: perplexity ratio {with_range(row, 'perplexity_ratio', '.3f')}, "
        f"KL {number(row['mean_kl'], '.4f')}, first tokens that flip {share(row['first_flip_share'])}"
    )


_NOT_SHOWN = (
    "**What this does not show.** That an answer is good: the reference is the same model at full cost, a small one, which "
    "knows few of these answers. SemBlend itself: the baseline is rebuilt from its documented rule, finds donors by counting "
    "tokens instead of embedding them, and has no gate in front of it. A bound for the next request: these are means over a "
    "few dozen prompts of few suites, with 95 % bootstrap intervals over requests. A perplexity ratio near 1, or below it, "
    "is no evidence either way: a model can be as sure of another text's answer as of its own. Verified answers leave the "
    "server as tokens and log-probabilities, so that no KL is given for them."
)
