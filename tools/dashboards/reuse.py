"""Panels of reused text, the same for all engines, and those of what the embedded engine alone does."""

from __future__ import annotations

from engines import RATE, per_second
from panels import Panel, Target

_TOKENS = "kvgraft:prompt_tokens_total"
_KINDS = {
    "prefix": "exact",
    "continued": "continued",
    "segment": "shifted",
    "substituted": "substituted",
    "recomputed": "recomputed",
    "fresh": "computed",
}
"""Values of the label `kind`, and the words of reports."""
NOT_COMPUTED = 'kind=~"prefix|continued|segment|substituted"'


def share(metric: str, where: str) -> str:
    """The share of a counter's rate that has certain labels; 0 where none has, nothing without traffic."""
    return f"({per_second(metric, where=where)} or vector(0)) / ({per_second(metric)} > 0)"


def quantiles(histogram: str, *percents: int) -> tuple[Target, ...]:
    """Percentiles of a histogram."""
    series = f"sum by (le) (rate({histogram}_bucket{{@}}{RATE}))"
    return tuple(Target(f"histogram_quantile({percent / 100:g}, {series})", f"p{percent}") for percent in percents)


def _of_each(metric: str, kinds: dict[str, str]) -> tuple[Target, ...]:
    return tuple(Target(per_second(metric, where=f'kind="{kind}"'), word) for kind, word in kinds.items())


TEXT = (
    Panel(
        "Prompt tokens by class",
        "`exact` stand in front of the prompt as before; `continued` do, too, and are approximate; `shifted` are the same "
        "tokens at other positions, approximate; `substituted` are other tokens; `recomputed` were reused and computed again "
        "to be nearer to a full prefill; `computed` are the rest. Their labels `kind` are prefix, continued, segment, "
        "substituted, recomputed, fresh.",
        _of_each(_TOKENS, _KINDS),
        stack="percent",
    ),
    Panel(
        "Prompt tokens not computed",
        "Tokens per second that requests did not have to wait for, by where they came from.",
        _of_each(_TOKENS, {kind: _KINDS[kind] for kind in ("prefix", "continued", "segment", "substituted")}),
        stack="normal",
    ),
    Panel(
        "Prompt tokens by what became of their request",
        "`approx`: something was grafted or continued. `exact`: nothing was, and nothing was looked for in vain. "
        "`rejected`: a match was refused. `fallback`: reuse failed, and the request was computed.",
        (Target(per_second(_TOKENS, "outcome"), "{{outcome}}"),),
        stack="percent",
    ),
    Panel(
        "Misses by reason",
        "Requests without a graft, and why. `no_match` and `no_donors`: the text was not there. `not_worth_it`: too little "
        "of it. `no_room`, `deadline`, `store`: it could not be brought in time. `error`: look at the row of errors.",
        (Target(per_second("kvgraft:graft_misses_total", "reason"), "{{reason}}"),),
        unit="reqps",
        stack="normal",
    ),
    Panel(
        "Repairs",
        "Grafts by when the chosen tokens were computed again: `before` or `after` the first token. `none`: the answer ended "
        "before the repair; `exact`: nothing approximate was left in the end.",
        (Target(per_second("kvgraft:repairs_total", "time, outcome"), "{{time}}: {{outcome}}"),),
        unit="reqps",
        stack="normal",
    ),
    Panel(
        "Requests with a graft",
        "Share of those that ended and had not begun as verified drafts.",
        (
            Target(
                f"{per_second('kvgraft:grafted_requests_total')} / ({per_second('kvgraft:grafted_requests_total')} "
                f"+ (sum(rate(kvgraft:graft_misses_total{{@}}{RATE})) or vector(0)) > 0)",
                "grafted",
            ),
        ),
        unit="percentunit",
        top=1,
    ),
    Panel(
        "Finding and planning reuse",
        "Spent on every request, with a match or without.",
        quantiles("kvgraft:lookup_seconds", 50, 95, 99),
        unit="s",
    ),
    Panel(
        "Copying, and computing again",
        "`copy`: copying and rotating K/V of grafted requests. `recompute`: gaps and chosen tokens in passes beside the "
        "engine's own (vLLM and SGLang; in the embedded engine they are rows of its steps).",
        (
            Target(quantiles("kvgraft:graft_seconds", 95)[0].expr, "copy p95"),
            Target(quantiles("kvgraft:recompute_seconds", 95)[0].expr, "recompute p95"),
        ),
        unit="s",
    ),
    Panel(
        "Donors",
        "Texts that can be grafted, in all tiers, and those of them that lie in stores alone.",
        (
            Target("sum(kvgraft:donors{@})", "all tiers"),
            Target("sum(kvgraft:store_cold_donors{@})", "stores alone"),
        ),
    ),
    Panel(
        "Tokens of donors",
        "In all tiers.",
        (Target("sum(kvgraft:donor_tokens{@})", "tokens"),),
    ),
    Panel(
        "Donors in host memory",
        "Bytes on the fullest worker, and what it may take. Full is a cache at work: what is worth least leaves.",
        (
            Target("max(kvgraft:donor_host_bytes{@})", "taken"),
            Target("max(kvgraft:donor_host_limit_bytes{@})", "limit"),
        ),
        unit="bytes",
    ),
    Panel(
        "Reads of stores",
        "Donors that were read for a request, by what became of it. All but `hit` are computed instead.",
        (Target(per_second("kvgraft:store_reads_total", "store, outcome"), "{{store}} {{outcome}}"),),
        nothing="No store",
        unit="ops",
    ),
    Panel(
        "Writes to stores",
        "Donors that were offered, by what became of them.",
        (Target(per_second("kvgraft:store_writes_total", "store, outcome"), "{{store}} {{outcome}}"),),
        nothing="No store",
        unit="ops",
    ),
    Panel(
        "Bytes of stores",
        "What arrived and what was written.",
        (
            Target(per_second("kvgraft:store_read_bytes_total", "store"), "{{store}} read"),
            Target(per_second("kvgraft:store_written_bytes_total", "store"), "{{store}} written"),
        ),
        unit="Bps",
        nothing="No store",
    ),
    Panel(
        "Waiting for stores",
        "Of requests whose K/V were read.",
        quantiles("kvgraft:store_read_seconds", 50, 95),
        unit="s",
    ),
    Panel(
        "Calls of a semantic provider",
        "For requests with reuse=substitute: a text that stands in (`hit`) or none (`miss`), and calls that took too long or "
        "failed.",
        (Target(per_second("kvgraft:semantic_calls_total", "outcome"), "{{outcome}}"),),
        unit="ops",
        nothing="No provider",
    ),
)

EMBEDDED_TEXT = (
    Panel(
        "Healing",
        "Tokens per second that were computed exactly behind grafts, after the answer, and texts that wait for it.",
        (
            Target(per_second("kvgraft:healed_tokens_total"), "tokens/s"),
            Target("sum(kvgraft:heal_candidates{@})", "texts that wait"),
        ),
    ),
    Panel(
        "Texts healed and not healed",
        "To their end, and dropped by reason.",
        (
            Target(per_second("kvgraft:healed_requests_total"), "healed"),
            Target(per_second("kvgraft:heals_dropped_total", "reason"), "dropped: {{reason}}"),
        ),
        unit="ops",
    ),
    Panel(
        "Verified answers",
        "Share of provisional tokens that a full prefill did not confirm, and when the first of them came.",
        (
            Target(
                f"{per_second('kvgraft:retracted_tokens_total')} / ({per_second('kvgraft:drafted_tokens_total')} > 0)",
                "retracted",
            ),
        ),
        unit="percentunit",
        top=1,
    ),
    Panel(
        "Requests with drafts, and their first token",
        "Verified requests per second, and the p95 of seconds to a provisional first token.",
        (
            Target(per_second("kvgraft:verified_requests_total"), "requests/s"),
            Target(quantiles("kvgraft:time_to_first_provisional_token_seconds", 95)[0].expr, "first token p95, s"),
        ),
    ),
    Panel(
        "Certified loss",
        "Mean loss of grafted answers that audits have certified, by class of reuse and part of the answer. 1: nothing is "
        "certified. Without a calibration there is none.",
        (Target("max by (reuse_class, part) (kvgraft:risk_certified{@})", "{{reuse_class}} {{part}}"),),
        unit="percentunit",
        top=1,
        nothing="No calibration",
    ),
    Panel(
        "Audits",
        "Grafted requests compared with a full prefill at the present notch. `breached`: they showed a higher risk than was "
        "asked for, and reuse has become more careful.",
        (
            Target(
                "sum by (reuse_class, part, notch, status) (kvgraft:risk_audits{@})",
                "{{reuse_class}} {{part}} {{notch}}: {{status}}",
            ),
        ),
        nothing="No calibration",
    ),
    Panel(
        "Donors named by an embedder",
        "`donors` named, `tokens` that were matched only thanks to that, texts `embedded`, `dropped` and `errors`.",
        (Target(per_second("kvgraft:proposals_total", "what"), "{{what}}"),),
        nothing="No embedder",
    ),
)

ERRORS = (
    Panel(
        "Failures of reuse",
        "Each became a miss and its request was computed; the log names it.",
        (Target(per_second("kvgraft:graft_errors_total"), "failures"),),
        unit="ops",
    ),
    Panel(
        "Failures of stores",
        "Reads that were corrupt, failed or late, and writes that failed. `resting`: the last read failed or came late.",
        (
            Target(
                per_second("kvgraft:store_reads_total", "outcome", 'outcome=~"corrupt|failed|late|look_failed"'),
                "read {{outcome}}",
            ),
            Target(per_second("kvgraft:store_writes_total", "outcome", 'outcome="failed"'), "write {{outcome}}"),
            Target("max by (store) (kvgraft:store_resting{@})", "{{store}} resting"),
        ),
        nothing="No store",
    ),
    Panel(
        "Requests that fell back",
        "Share of prompt tokens of requests whose reuse failed or was refused.",
        (
            Target(share(_TOKENS, 'outcome="fallback"'), "fallback"),
            Target(share(_TOKENS, 'outcome="rejected"'), "rejected"),
        ),
        unit="percentunit",
        top=1,
    ),
)
