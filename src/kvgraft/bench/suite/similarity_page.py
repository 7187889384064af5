"""Table T2 as Markdown. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Series
from kvgraft.bench.suite.cells import claims, number, share, sides, table, with_range

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.panels import Panel

    Row = Mapping[str, Any]

_COLUMNS = (
    "sentences replaced",
    "alike (cosine)",
    "could be reused",
    "reused",
    "wrong tokens",
    "off",
    "on",
    "speed-up",
    "mean KL",
    "first token flips",
    "score off / on",
    "right answer in it off / on",
)
_CLAIMS = (
    ("`partial_60`", "88 % cached, 5.0x, ROUGE-L 0.547", ("50%",)),
    ("`partial_80`", "58 % cached, 1.9x, ROUGE-L 0.449", ("20%",)),
    ("`paraphrase`", "76 % cached, 3.2x, ROUGE-L 0.478; served from a cosine of 0.80 on", ("reworded",)),
    ("`unrelated`", "nothing cached, ROUGE-L 0.878", ("another document",)),
)
"""SGLang #31057, the author's figures for Qwen2.5-7B-AWQ at 8K and 16K; ROUGE-L of two runs with nothing reused is 0.878."""


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what belongs to it.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    settings, rows = result["settings"], result["rows"]
    clock = {
        "cpu": "processor time of the process, measured on a machine that did other work",
        "wall": "wall time",
    }[settings["clock"]]
    return "\n\n".join(
        [
            f"{settings['model']}, {settings['dtype']}; {settings['documents']} documents of {settings['passages']} "
            "descriptions out of the standard library were read behind one instruction and are asked about behind another, "
            f"under `{settings['policy']}` at {settings['recompute_ratio']:.0%} with `{settings['correction']}`. Sentences "
            "are replaced by others of the same library, anywhere but in the description that is asked about. *Reworded* has "
            "synonyms, and neighbouring words in the other order. *Alike* is the cosine of token counts of prompt and donor: "
            "what a cache that goes by similarity sees. *Could be reused* are tokens in runs of "
            f"{settings['min_run']} and more that were read at any offset, found exactly; tokens that are computed again "
            f"are not among the reused. Times are {clock} until the logits of the first token, medians over documents and "
            f"{settings['rounds']} rounds; speed-ups are of all documents together, with 95 % bootstrap intervals over "
            "them. KL is against full prefill, over 32 greedy tokens; a score is word F1.",
            table(_COLUMNS, [_line(row) for row in rows]),
            _claims(rows),
            "**What this does not show.** Where edits stand matters, and here they are spread evenly, which breaks most "
            "runs: an edit of one place leaves more. A few documents of one kind and length. Whether the edit should have "
            "changed the answer: the description that is asked about stays as it was, and what happens when it does not is "
            "told by stale answers in T6. A small model knows few of these answers, so that equal scores prove little.",
        ]
    )


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = record["result"]["rows"]
    names = [_name(row).replace(" (negative control)", "") for row in rows]
    shares = [
        Series.of(label, rows, field, 100)
        for label, field in {"could be reused": "bound_share", "reused": "reused_share"}.items()
    ]
    return [
        Bars("prompt tokens, %, by sentences replaced", names, shares),
        Bars("speed-up of the first token", names, [Series.of("on", rows, "speedup_ratio")], mark=1),
        Bars("mean KL to full prefill, nats", names, [Series.of("on", rows, "mean_kl")]),
    ]


def _line(row: Row) -> list[str]:
    return [
        _name(row),
        number(row["cosine"], ".3f"),
        share(row["bound_share"]),
        share(row["reused_share"]),
        str(row["wrong_tokens"]),
        number(row["off_ms"], ",.0f") + " ms",
        number(row["on_ms"], ",.0f") + " ms",
        with_range(row, "speedup_ratio", ".2f", "x"),
        number(row["mean_kl"], ".4f"),
        share(row["first_flip_share"]),
        sides(row, "score"),
        sides(row, "contains"),
    ]


def _name(row: Row) -> str:
    if row["edited_share"] is None:
        return f"{row['variant']} (negative control)"
    return share(row["edited_share"])


def _claims(rows: Sequence[Row]) -> str:
    head = ("case", "SemBlend says (SGLang #31057)", "the nearest of ours, measured")
    return claims(head, _CLAIMS, {row["variant"]: _measured(row) for row in rows})


def _measured(row: Row) -> str:
    return (
        f"{_name(row)}: {share(row['reused_share'])} reused, {with_range(row, 'speedup_ratio', '.2f', 'x')}, KL "
        f"{number(row['mean_kl'], '.4f')}, first tokens that flip {share(row['first_flip_share'])}"
    )
