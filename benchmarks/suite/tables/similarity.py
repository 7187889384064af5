"""Table T2: documents that were edited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.bench.panels import Bars, Series

from .cells import Result, Row, claims, number, ranged, ranged_share, share, table, text

if TYPE_CHECKING:
    from kvgraft.bench.panels import Panel

_CLAIMS = (
    ("`partial_60`", "88 % cached, 5.0x, ROUGE-L 0.547", ("50%",)),
    ("`partial_80`", "58 % cached, 1.9x, ROUGE-L 0.449", ("20%",)),
    ("`paraphrase`", "76 % cached, 3.2x, ROUGE-L 0.478; served from a cosine of 0.80 on", ("reworded",)),
    ("`unrelated`", "nothing cached, ROUGE-L 0.878", ("another document",)),
)
"""SGLang #31057, the author's figures for Qwen2.5-7B-AWQ at 8K and 16K; ROUGE-L of two runs with nothing reused is 0.878."""


def _name(row: Row) -> str:
    return f"{row['variant']} (negative control)" if row["edited_share"] is None else share("edited_share")(row)


_SPEEDUP, _KL, _FLIPS = ranged("speedup_ratio", ".2f", "x"), ranged("mean_kl", ".4f"), ranged_share("first_flip_share")
_COLUMNS = (
    ("sentences replaced", _name),
    ("documents", text("documents")),
    ("alike (cosine)", number("cosine", ".3f")),
    ("could be reused", share("bound_share")),
    ("reused", share("reused_share")),
    ("wrong tokens", text("wrong_tokens")),
    ("speed-up", _SPEEDUP),
    ("mean KL", _KL),
    ("first token flips", _FLIPS),
)


def _measured(row: Row) -> str:
    reused = share("reused_share")(row)
    return f"{_name(row)}: {reused} reused, {_SPEEDUP(row)}, KL {_KL(row)}, first tokens that flip {_FLIPS(row)}"


def _claims(result: Result) -> str:
    head = ("case", "SemBlend says (SGLang #31057)", "the nearest of ours, measured")
    return claims(head, _CLAIMS, {row["variant"]: _measured(row) for row in result["rows"]})


BLOCKS = {"edits": lambda result: table(_COLUMNS, result["rows"]), "claims": _claims}


def panels(result: Result) -> list[Panel]:
    """Reuse, speed-up and KL by edit."""
    rows = result["rows"]
    names = [_name(row).replace(" (negative control)", "") for row in rows]
    shares = [Series.of("could be reused", rows, "bound_share", 100), Series.of("reused", rows, "reused_share", 100)]
    return [
        Bars("prompt tokens, %, by sentences replaced", names, shares),
        Bars("speed-up of the first token", names, [Series.of("on", rows, "speedup_ratio")], mark=1),
        Bars("mean KL to full prefill, nats", names, [Series.of("on", rows, "mean_kl")]),
    ]
