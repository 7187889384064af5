"""Table `peers` as Markdown, from what `benchmarks/peers/suite_peers.py` has recorded. Measures nothing."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Point, Points, Series

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvgraft.bench.panels import Panel

NOISE_SHARE = 0.25
"""Of the gap of unrelated prompts: from there on K/V that were put in place are not those of the text."""

_HEAD = (
    "| peer | case | prompt | reused | TTFT, speed-up over its own cold run | gap, nats | same first token"
    " | one layer: gap (unrelated prompt) | K/V are right |"
)
_CASES = (
    "Second prompt, beside the first: `prefix` the same text and another question, `deleted` the middle third of "
    "the document left out, `front` the document alone, `moved` behind an instruction of another length, "
    "`aligned` moved by 256 tokens, `unrelated` the control. `gap` is the largest difference of the "
    "log-probabilities of the five likeliest first tokens to a cold run of the same prompt. With one layer K/V "
    "depend on token and position alone: a gap there is rounding, or K/V that do not belong where they are; `no` "
    "stands where it is more than a quarter of the peer's median for unrelated prompts and more than it shows for "
    "an equal prefix."
)
_CLAIM = (
    "SemBlend says, of its adapter for SGLang (#31057, its author's figures at 8K and 16K): first tokens 5.0 "
    "times as fast at a ROUGE-L of 0.547 where 60 % is reused, 1.9 times at 0.449 for 80 %, beside 0.878 between "
    "two runs without reuse. We measured its connector for vLLM, with an ideal lookup that finds every equal run: "
    "{semblend} Ours: {ours}"
)
_LIMITS = (
    "**What this does not show.** A GPU, on which other layouts of K/V, and CUDA code of peers, are used. {rounds} "
    "rounds per case on one machine. Peers compute differently (llama.cpp on 4-bit weights and 8-bit activations, "
    "without this machine's widest vector instructions, the others in float32), so that only ratios to their own "
    "cold run are given. Prompts are sources of Python's standard library of {document} tokens, one document "
    "each: no mixing of documents, no load, no eviction. llama.cpp's cache of prompts in host memory and vLLM's "
    "prefix cache were off, which both have besides; LMCache's blending was not run: 0.5.6 ships the server's "
    "half of it alone."
)


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what it does not show.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    settings, rows = result["settings"], result["rows"]
    limits = {peer: allowed_gap([row for row in rows if row["peer"] == peer]) for peer in {row["peer"] for row in rows}}
    told = {name: _measured(rows, name) for name in ("semblend-vllm-connector", "kvgraft")}
    versions = [f"{name} {version}" for name, version in settings["versions"].items() if isinstance(version, str)]
    lines = [
        f"{settings['model']}; {', '.join(versions)}; vLLM and kvgraft as in the table of engines.",
        "",
        _HEAD,
        "|" + "---|" * (_HEAD.count("|") - 1),
        *(_line(row, limits[row["peer"]]) for row in rows),
        "",
        _CASES,
        "",
        _CLAIM.format(semblend=told["semblend-vllm-connector"], ours=told["kvgraft"]),
        "",
        _LIMITS.format(**settings),
    ]
    return "\n".join(lines)


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = [row for row in record["result"]["rows"] if "failure" not in row]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    known = {(row["peer"], row["case"]): row for row in rows}
    of_peer = {peer: [row for row in rows if row["peer"] == peer] for peer in peers}
    limits = {peer: allowed_gap(own) for peer, own in of_peer.items()}
    groups = {
        peer: [
            Point(row["case"], row["ttft_ratio"], row["gap"], is_right(row, limits[peer]) is False)
            for row in own
            if row["reused_tokens"]
        ]
        for peer, own in of_peer.items()
    }
    reused = [Series.of(peer, [known.get((peer, case), {}) for case in cases], "reused_share", 100) for peer in peers]
    return [
        Bars("prompt tokens reused, %", cases, reused),
        Points(
            "what reuse gives and changes (hollow: K/V of other text)",
            "speed-up over its own cold run",
            "gap of the first token, nats",
            groups,
            y_linear_below=1e-2,
        ),
    ]


def allowed_gap(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest gap with one layer that is still rounding of the peer that `rows` are of; None if it was not measured.

    That is what it shows for an equal prefix, or a quarter of the median gap between unrelated prompts if that is more.
    """
    unrelated = [row["one_layer_unrelated_gap"] for row in rows if row.get("one_layer_unrelated_gap") is not None]
    if not unrelated:
        return None
    same = [row["one_layer_gap"] for row in rows if row["case"] == "prefix" and row.get("one_layer_gap") is not None]
    return float(max(NOISE_SHARE * statistics.median(unrelated), *same, 0.0))


def is_right(row: Mapping[str, Any], limit: float | None) -> bool | None:
    """Whether what was reused with one layer were K/V of these tokens at these positions; None if nothing was."""
    gap = row.get("one_layer_gap")
    if gap is None or limit is None or not row.get("one_layer_reused_tokens"):
        return None
    return bool(gap <= limit)


def _line(row: Mapping[str, Any], limit: float | None) -> str:
    if "failure" in row:
        return f"| {row['peer']} | {row['case']} | failed: {row['failure']} |" + " |" * 6
    verdict = {True: "yes", False: "**no**", None: "nothing reused"}[is_right(row, limit)]
    layer = (
        "" if row.get("one_layer_gap") is None else f"{row['one_layer_gap']:.4f} ({row['one_layer_unrelated_gap']:.2f})"
    )
    return (
        f"| {row['peer']} | {row['case']} | {row['prompt_tokens']:,.0f}"
        f" | {row['reused_tokens']:,.0f} ({row['reused_share']:.0%})"
        f" | {row['ttft_ratio']:.2f}x [{row['ttft_ratio_low']:.2f}, {row['ttft_ratio_high']:.2f}] | {row['gap']:.4f}"
        f" | {row['same_first_token_share']:.0%} | {layer} | {verdict} |"
    )


def _measured(rows: Sequence[Mapping[str, Any]], peer: str) -> str:
    found = {row["case"]: row for row in rows if row["peer"] == peer and "failure" not in row}
    if not found:
        return "it did not run here."
    told = [f"{case} {found[case]['reused_share']:.0%}" for case in ("front", "moved", "aligned") if case in found]
    return f"{', '.join(told)} reused." if told else "not asked."
