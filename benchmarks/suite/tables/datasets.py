"""Table T3: what data sets share, and what reuse makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import Result, Row, claims, number, ranged, share, sides, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel

_CLAIMS = (
    (
        "hit rate",
        "0.826 LongEval, 0.757 WikiText, 0.296 NarrativeQA, 0.176 SCBench, 0.248 TriviaQA; its repository has 0.074-0.094, "
        "0.098-0.155, 0.08, 0.23-0.40, 0.906 for the same. A hit there is a first token that came 1.3 times as soon",
        ("lines",),
    ),
    (
        "CNN/DailyMail, time to first token",
        "7.1x at 8K, 9.4x at 16K, 12.2x at 24K, of donors that match",
        ("xtemplate: CNN/DailyMail",),
    ),
    ("SAMSum", "served, perplexity ratio 1.140-1.198", ("xtemplate: SAMSum",)),
    (
        "real conversations (WildChat)",
        "faster first tokens: one cold median over each request's own time",
        ("ShareGPT", "Arena-Hard"),
    ),
)
"""READMEs of SemBlend 0.3.25 and of earlier versions, and the rows that answer them."""


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
    ("wrong tokens", text("wrong_tokens")),
)
_SAMPLE = (
    ("data set", _name),
    ("measured", text("sample")),
    ("hits", text("hits")),
    ("reused", share("sample_reused_share")),
    ("speed-up, all", _SPEEDUP),
    ("mean KL", number("mean_kl", ".4f")),
    ("score off / on", sides("score")),
)


def _measured(row: Row) -> str:
    found = f"{row['dataset']}: {share('reused_share')(row)} of tokens reused where {share('bound_share')(row)} can be"
    return f"{found}, {row['hits']} hits of {row['sample']}, {_SPEEDUP(row)} over all" if row["sample"] else found


def _claims(result: Result) -> str:
    head = ("claim", "SemBlend says", "ours, measured")
    return claims(head, _CLAIMS, {row["dataset"]: _measured(row) for row in result["rows"]})


def _sampled(result: Result) -> list[Row]:
    return [row for row in result["rows"] if row["sample"]]


BLOCKS = {
    "shares": lambda result: table(_SHARES, result["rows"]),
    "sample": lambda result: table(_SAMPLE, _sampled(result)),
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
