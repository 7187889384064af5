"""Table T3 as Markdown, with what others say of the same data sets and what the table does not show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Series
from kvgraft.bench.suite.cells import claims, number, share, sides, table, with_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.panels import Panel

    Row = Mapping[str, Any]

_COLUMNS = {
    "shares": ("data set", "prompts", "tokens", "prefix", "256-prefix", "256-chunks", "ours", "bound", "wrong tokens"),
    "sample": (
        "data set",
        "measured",
        "hits",
        "reused",
        "off",
        "on",
        "speed-up, all",
        "speed-up, hits",
        "mean KL",
        "median KL",
        "score off / on",
        "right answer in it off / on",
    ),
}

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
"""What SemBlend says (READMEs of 0.3.25 and of earlier versions), and the rows that answer it."""


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what belongs to it.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    rows, settings = result["rows"], result["settings"]
    absent = settings["absent"]
    chosen = " Only some rows were chosen; the others were not measured." if settings["names"] else ""
    left_out = f"\n\nNot on the machine and left out: {', '.join(absent)}." if absent else ""
    return "\n\n".join(
        [
            f"Shares of all prompt tokens of each pack in order of arrival, with the tokenizer of {settings['model']}; runs "
            f"of {settings['min_run']} tokens and more count. *prefix*: to the token. *256-prefix*: in whole chunks of 256 "
            "tokens, as LMCache keeps them. *256-chunks*: such chunks found at any such offset. *bound*: runs that occur at "
            f"any offset of an earlier prompt, found exactly.{chosen}{left_out}",
            table(_COLUMNS["shares"], [_shares(row) for row in rows]),
            _about_sample(settings),
            table(_COLUMNS["sample"], [_sample(row) for row in rows if row["sample"]]),
            _claims(rows),
            _not_shown(rows),
        ]
    )


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = record["result"]["rows"]
    labels = {
        "prefix": "prefix_share",
        "256-prefix": "aligned_prefix_share",
        "ours": "reused_share",
        "bound": "bound_share",
    }
    shares = [Series.of(label, rows, field, 100) for label, field in labels.items()]
    measured = [row for row in rows if row["sample"]]
    faster = [Series.of("all requests", measured, "speedup_all_ratio")]
    return [
        Bars("prompt tokens that can be reused, %", [row["dataset"] for row in rows], shares),
        Bars("speed-up of the first token, all requests", [row["dataset"] for row in measured], faster, mark=1),
    ]


def _shares(row: Row) -> list[str]:
    names = ("prefix_share", "aligned_prefix_share", "aligned_chunks_share", "reused_share", "bound_share")
    counts = [f"{row['requests']:,}", f"{row['tokens']:,}"]
    return [_name(row), *counts, *(share(row[name]) for name in names), str(row["wrong_tokens"])]


def _sample(row: Row) -> list[str]:
    return [
        _name(row),
        str(row["sample"]),
        str(row["hits"]),
        share(row["sample_reused_share"]),
        number(row["off_ms"], ",.0f") + " ms",
        number(row["on_ms"], ",.0f") + " ms",
        with_range(row, "speedup_all_ratio", ".2f", "x"),
        with_range(row, "speedup_hits_ratio", ".2f", "x"),
        number(row["mean_kl"], ".4f"),
        number(row["median_kl"], ".4f"),
        sides(row, "score"),
        sides(row, "contains"),
    ]


def _name(row: Row) -> str:
    return f"{row['dataset']} (negative control)" if row["kind"] == "negative control" else str(row["dataset"])


def _about_sample(settings: Row) -> str:
    clock = {
        "cpu": "processor time of the process, measured on a machine that did other work",
        "wall": "wall time",
    }[settings["clock"]]
    return (
        f"Of each, up to {settings['limit']} prompts of at most {settings['max_prompt_tokens']:,} tokens (seed "
        f"{settings['seed']}; where requests name documents, of the half on which nothing was tuned), under "
        f"`{settings['policy']}` with `{settings['correction']}`. A *hit* is a request into which a span was grafted. Times "
        f"are {clock}, until the logits of the first token, medians over requests; rounds: {settings['rounds']}. A speed-up "
        "is the time of all requests off over that with reuse, with 95 % bootstrap intervals over requests. KL is against "
        "full "
        "prefill, over 32 greedy tokens, of hits. A score is word F1, of `lines` whether the value is right."
    )


def _claims(rows: Sequence[Row]) -> str:
    head = ("claim", "SemBlend says", "ours, measured")
    return claims(head, _CLAIMS, {row["dataset"]: _measured(row) for row in rows})


def _measured(row: Row) -> str:
    found = f"{row['dataset']}: {share(row['reused_share'])} of tokens reused where {share(row['bound_share'])} can be"
    if not row["sample"]:
        return found
    return (
        f"{found}, {row['hits']} hits of {row['sample']}, {with_range(row, 'speedup_all_ratio', '.2f', 'x')} over all"
    )


def _not_shown(rows: Sequence[Row]) -> str:
    controls = [row["dataset"] for row in rows if row["kind"] == "negative control"]
    return (
        "**What this does not show.** How soon a server answers: there is no queue, no other request, and what is published "
        "behind the first token is not timed. What a cache of bounded size keeps: planning has every earlier prompt at hand, "
        "and before a measured request the latest prompts that have its documents are read. Long prompts: those above the "
        "limit are planned and not measured. Whether a large model would answer well: a small one knows few of these "
        "answers, so that equal scores prove little, and KL says more. WikiText, NarrativeQA, SCBench, TriviaQA, XSum and "
        "MultiNews: they are not among the packs, and their claims are not answered."
        + (f" {' and '.join(controls)} have next to nothing to reuse; what they show is the cost." if controls else "")
    )
