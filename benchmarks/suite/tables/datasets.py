"""Table T3: what data sets share, and what reuse makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from ..sources import PUBLIC
from .cells import Columns, Result, Row, claims, number, ranged, ranged_share, share, sides, table, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft.bench.panels import Panel

_CLAIMS = (
    ("LongEval", "82.6 % hits; its repository has 7.4-9.4 %", ("LongEval", "lines")),
    ("WikiText-103", "75.7 % hits; its repository has 9.8-15.5 %", ("WikiText-103",)),
    ("NarrativeQA", "29.6 % hits; its repository has 8 %", ("NarrativeQA",)),
    ("TriviaQA", "24.8 % hits; its repository has 90.6 %", ("TriviaQA",)),
    ("SCBench", "17.6 % hits; its repository has 23-40 %", ("SCBench",)),
    (
        "CNN/DailyMail",
        "50 % hits; first tokens 7.1x at 8K, 9.4x at 16K, 12.2x at 24K, of donors that match",
        ("CNN/DailyMail", "xtemplate: CNN/DailyMail"),
    ),
    ("MultiNews", "75 % hits", ("MultiNews",)),
    ("SAMSum", "88 % hits, perplexity ratio 1.140-1.198", ("SAMSum", "xtemplate: SAMSum")),
    (
        "real conversations (WildChat)",
        "29.2 and 30.0 % hits, first tokens: one cold median over each request's own time",
        ("WildChat", "ShareGPT", "Arena-Hard"),
    ),
    ("conversations of several turns", "99.5 % hits, 5.1x", ("mturn",)),
    ("a passage behind other instructions", "3.26x and 3.71x", ("xinstr", "rag: XQuAD", "rag: HotpotQA")),
)
"""READMEs of SemBlend 0.3.25 and of earlier versions, and the rows that answer them."""
_STAND_INS = frozenset({"ShareGPT", "Arena-Hard"})
"""Rows that say something of a claim, and are no data of it."""


def _name(row: Row) -> str:
    return f"{row['dataset']} (negative control)" if row["kind"] == "negative control" else str(row["dataset"])


_SPEEDUP = ranged("speedup_all_ratio", ".2f", "x")
_SHARES = (
    ("data set", _name),
    ("prompts", number("requests", ",")),
    ("tokens", number("tokens", ",")),
    ("prefix", share("prefix_share")),
    ("256-prefix", share("aligned_prefix_share")),
    ("256-chunks", share("aligned_chunks_share")),
    ("ours", share("reused_share")),
    ("bound", share("bound_share")),
    ("half reused", share("half_share")),
    ("wrong tokens", text("wrong_tokens")),
)
_SAMPLE = (
    ("data set", _name),
    ("measured", text("sample")),
    ("hits", text("hits")),
    ("reused", share("sample_reused_share")),
    ("speed-up, all", _SPEEDUP),
    ("mean KL", ranged("mean_kl", ".4f")),
    ("first token flips", ranged_share("first_flip_share")),
    ("32 tokens equal", ranged_share("greedy_equal_share")),
    ("score off / on", sides("score")),
    ("difference", ranged("score_difference", "+.3f")),
)


_LATER = {"half reused": "half_share", "32 tokens equal": "greedy_equal_share", "difference": "score_difference"}
"""Columns of fields that older records lack."""


def _table(columns: Columns, rows: Sequence[Row]) -> str:
    return table([each for each in columns if all(_LATER.get(each[0], "dataset") in row for row in rows)], rows)


def _measured(row: Row) -> str:
    found = f"{row['dataset']}: {share('reused_share')(row)} of tokens reused where {share('bound_share')(row)} can be"
    return f"{found}, {row['hits']} hits of {row['sample']}, {_SPEEDUP(row)} over all" if row["sample"] else found


def _claims(result: Result) -> str:
    """Of a record of chosen data sets the claims that they answer, else all."""
    measured = {row["dataset"]: _measured(row) for row in result["rows"]}
    is_chosen = bool(result["settings"].get("names"))
    found = [claim for claim in _CLAIMS if not is_chosen or measured.keys() & set(claim[2])]
    remedies = {about: _remedy(names[0]) for about, _, names in found if not measured.keys() & set(names) - _STAND_INS}
    remedies = {about: commands for about, commands in remedies.items() if commands}
    return claims(("claim", "SemBlend says", "ours, measured"), found, measured, remedies)


def _remedy(row: str) -> str:
    """Return the commands that measure a row with files of its data set, if it is one of those that have some."""
    pack = next((dataset.pack for dataset in PUBLIC if dataset.name == row), None)
    return "" if pack is None else remedy(row, pack, "datasets --names")


def remedy(name: str, pack: str, table_and_option: str) -> str:
    """Say that a data set is not measured, and return the commands that make a pack of its file and measure that."""
    return (
        f"{name} is not among the packs; with a file of it: `kvgraft bench pack dataset {pack} FILE --output packs`, "
        f"then `python -m benchmarks.suite {table_and_option} {pack} --data packs`"
    )


def _sampled(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row["sample"]]


BLOCKS = {
    "shares": lambda result: _table(_SHARES, result["rows"]),
    "sample": lambda result: _table(_SAMPLE, _sampled(result)),
    "claims": _claims,
}


def panels(result: Result) -> list[Panel]:
    """Shares of all prompts, and speed-ups of the sample."""
    rows, sampled = result["rows"], _sampled(result)
    labels = {
        "prefix": "prefix_share",
        "256-prefix": "aligned_prefix_share",
        "ours": "reused_share",
        "bound": "bound_share",
    }
    shares = [Series.of(label, rows, field, 100) for label, field in labels.items()]
    faster = [Series.of("all requests", sampled, "speedup_all_ratio")]
    return [
        Bars("prompt tokens that can be reused, %", [row["dataset"] for row in rows], shares),
        Bars("speed-up of the first token, all requests", [row["dataset"] for row in sampled], faster, mark=1),
    ]
