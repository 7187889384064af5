"""Table `engines` as Markdown, from what `benchmarks/engines/suite_engines.py` has recorded. Measures nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgraft.bench.panels import Bars, Series

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvgraft.bench.panels import Panel

_HEAD = (
    "| engine | prompts | variant | reused | prompts with a hit | TTFT p50 | p95 | speed-up over off | same first token"
    " | requests/s within the limit |"
)
_CLAIM = (
    "SemBlend says: a hit is an answer whose first token comes 1.3 times as fast, a rule by which its "
    "repository's own runs count 7.5-27 % hits for an unchanged SGLang; under load its result files show first "
    "tokens at 0.31-0.66 times the speed of the engine alone, and a throughput that is 12-56 % lower. Here a hit "
    "is 16 or more prompt tokens that the engine's counter says it did not compute. We measured: {measured}"
)
_LIMITS = (
    "**What this does not show.** A GPU. On {threads} core{s} of a CPU a model of 135 M parameters in float32 "
    "computes some hundred tokens per second, so that a token saved is worth more, and a fixed cost of a graft "
    "less, than on a GPU. {requests} prompts per variant make a p95 of one or two of them. Rates were looked for "
    "in {load_runs} runs of {load_requests} requests each, which tells them apart by a factor of about 1.4, no "
    "finer. Engines are not compared with one another: their kernels for CPUs are not what they are made for. "
    "Prompts come one after the other, or at a rate from one client, without other tenants' text between."
)


def render(record: Mapping[str, Any]) -> str:
    """Return the table and what it does not show.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    result = record["result"]
    settings, rows = result["settings"], result["rows"]
    versions = [f"{name} ({_packages(found)})" for name, found in settings["engines"].items()]
    lines = [
        f"{settings['requests']} prompts of {settings['pack']} behind {settings['warmup']} that were not timed,"
        f" {settings['model']}; limit of the rates: {settings['limit_factor']:g} times the p95 of `off` one by one."
        f" Engines: {'; '.join(versions)}.",
        "",
        _HEAD,
        "|" + "---|" * (_HEAD.count("|") - 1),
        *map(_line, rows),
        "",
        _CLAIM.format(measured=_measured(rows)),
        "",
        _LIMITS.format(**settings, s="" if settings["threads"] == 1 else "s"),
    ]
    return "\n".join(lines)


def panels(record: Mapping[str, Any]) -> list[Panel]:
    """Return the pictures of the table, from left to right.

    Args:
        record: As `benchmarks/record.py` writes it.
    """
    rows = [row for row in record["result"]["rows"] if "failure" not in row]
    places = list(dict.fromkeys((row["engine"], row["workload"]) for row in rows))
    names = [f"{engine}, {workload}" for engine, workload in places]
    known = {(row["engine"], row["workload"], row["variant"]): row for row in rows}
    variants = list(dict.fromkeys(row["variant"] for row in rows))

    def series(field: str) -> list[Series]:
        return [
            Series.of(variant, [known.get((*place, variant), {}) for place in places], field) for variant in variants
        ]

    return [
        Bars("speed-up of the first token over off", names, series("ttft_ratio"), mark=1),
        Bars("time to first token, median, ms", names, series("ttft_ms")),
        Bars("time to first token, p95, ms", names, series("ttft_p95_ms")),
    ]


def _line(row: Mapping[str, Any]) -> str:
    if "failure" in row:
        return f"| {row['engine']} | {row['workload']} | {row['variant']} | failed: {row['failure']} |" + " |" * 6
    rate = "" if row.get("requests_per_s") is None else _rate(row)
    return (
        f"| {row['engine']} | {row['workload']} | {row['variant']} | {row['reused_share']:.0%} | {row['hit_share']:.0%}"
        f" | {row['ttft_ms']:,.0f} ms | {row['ttft_p95_ms']:,.0f} ms"
        f" | {row['ttft_ratio']:.2f}x [{row['ttft_ratio_low']:.2f}, {row['ttft_ratio_high']:.2f}]"
        f" | {row['same_first_token_share']:.0%} | {rate} |"
    )


def _packages(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _rate(row: Mapping[str, Any]) -> str:
    """The highest rate that was sustained; 0 is a rate, too."""
    if not row["requests_per_s"]:
        return f"none of those tried ({row['limit_ms']:,.0f} ms)"
    return f"{row['requests_per_s']:.2f} ({row['limit_ms']:,.0f} ms)"


def _measured(rows: list[Mapping[str, Any]]) -> str:
    ours = [row for row in rows if row["variant"] == "kvgraft" and row["workload"] == "documents"]
    told = [
        f"{row['engine']} {row['ttft_ratio']:.2f}x at {row['reused_share']:.0%} reused"
        + (f", {row['rate_ratio']:.2f} times the rate of off" if row.get("rate_ratio") else "")
        for row in ours
    ]
    return "; ".join(told) + "." if told else "nothing."
