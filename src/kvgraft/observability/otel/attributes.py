"""Names and values of span attributes. Never texts: of errors their kind, of reused text its length.

The names `gen_ai.*` are those of OpenTelemetry's conventions for generative AI, which are still in development;
`http.*`, `url.*` and `error.type` are stable. What they do not know is `kvgraft.*`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.observability.request_stages import grafted_spans
from kvgraft.reuse.classes import ReuseClass, reuse_class

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from kvgraft.observability.otel.exchange import Exchange
    from kvgraft.observability.recorder import RequestRecord
    from kvgraft.types import GraftReport, SpanReport

    Value = str | bool | int | float | Sequence[str]
    Attributes = Mapping[str, Value]

_MIXED = "mixed"
"""The class of several prompts of different classes."""


def operation_of(route: str) -> str:
    """Name what an endpoint does, as the conventions do."""
    return "text_completion" if route == "/v1/completions" else "chat"


def server_attributes(exchange: Exchange, records: Sequence[RequestRecord], model: str) -> Attributes:
    """Return the attributes of a whole exchange: tokens are counted as in `usage` of its answer, cached ones exact only."""
    found: dict[str, Value | None] = {
        "gen_ai.operation.name": operation_of(exchange.route),
        "gen_ai.provider.name": "kvgraft",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "http.request.method": exchange.method,
        "http.route": exchange.route,
        "http.response.status_code": exchange.status,
        "error.type": exchange.error,
        "kvgraft.request.id": exchange.request_id,
        **_asked(exchange),
        **_counted(exchange, records),
    }
    return _told(found)


def stage_attributes(stage: str, index: int, record: RequestRecord) -> Attributes:
    """Return the attributes of one stage of choice `index`."""
    found: dict[str, Value | None] = {"kvgraft.choice.index": index, "kvgraft.engine_request.id": record.request_id}
    report = record.report
    if stage == "queue":
        found["kvgraft.preemptions"] = record.num_preemptions
    elif stage == "decode":
        # Not under the name of `gen_ai`: what adds that up over a trace would count tokens twice.
        found["kvgraft.output_tokens"] = record.output_tokens
    elif report is not None:
        found |= _stage_of(stage, report)
    return _told(found)


def graft_attributes(span: SpanReport) -> Attributes:
    """Return the attributes of one reused span."""
    return _told(
        {
            "kvgraft.graft.target_start": int(span.target_start),
            "kvgraft.graft.tokens": int(span.length),
            "kvgraft.graft.donor_id": int(span.donor_id),
            "kvgraft.graft.donor_start": int(span.donor_start),
            "kvgraft.graft.position_delta": int(span.position_delta),
            "kvgraft.graft.fidelity": span.fidelity.value,
            "kvgraft.graft.generation": int(span.generation),
            "kvgraft.graft.tier": span.tier or None,
        }
    )


def _asked(exchange: Exchange) -> dict[str, Value | None]:
    asked = exchange.asked
    if asked is None:
        return {}
    return {
        "gen_ai.response.id": asked.answer_id,
        "gen_ai.request.choice.count": len(asked.choices) // len({prompt for _, prompt in asked.choices}),
        "gen_ai.request.max_tokens": asked.max_tokens,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "kvgraft.reuse.mode": asked.reuse,
        "kvgraft.stream": asked.stream,
    }


def _counted(exchange: Exchange, records: Sequence[RequestRecord]) -> dict[str, Value | None]:
    """Prompts count once, with the reuse of their first choice; outputs of all choices count."""
    asked = exchange.asked
    if asked is None or not records:
        return {}
    prompt_of = dict(asked.choices)
    firsts = {prompt_of[record.request_id]: record for record in reversed(records)}
    prompts = [firsts[index] for index in sorted(firsts)]
    reports = [record.report for record in prompts if record.report is not None]
    times = [record.ttft_s for record in records if record.ttft_s is not None]
    return {
        "gen_ai.usage.input_tokens": sum(record.prompt_tokens for record in prompts),
        "gen_ai.usage.output_tokens": sum(record.output_tokens for record in records) if asked.has_output else 0,
        "gen_ai.response.finish_reasons": [record.outcome for record in records],
        "kvgraft.preemptions": sum(record.num_preemptions for record in records),
        "kvgraft.time_to_first_token_s": max(times, default=None),
        **(_reuse(reports) if reports else {}),
    }


def _reuse(reports: Sequence[GraftReport]) -> dict[str, Value | None]:
    classes = {_class_of(report).value for report in reports if report.spans}
    policies = {report.policy for report in reports}
    times = {report.repair.time.value for report in reports if report.repair is not None}
    misses = [report.miss.reason.value for report in reports if report.miss is not None]
    sums = {
        name: sum(int(getattr(report, f"{name}_tokens")) for report in reports)
        for name in ("exact", "continued", "shifted", "substituted", "recomputed", "corrected", "computed")
    }
    return {
        "gen_ai.usage.cache_read.input_tokens": sums["exact"],
        **{f"kvgraft.reuse.{name}_tokens": count for name, count in sums.items()},
        "kvgraft.reuse.class": _common(classes),
        "kvgraft.reuse.spans": sum(len(report.spans) for report in reports),
        "kvgraft.selection": _common(policies),
        "kvgraft.repair.time": _common(times),
        "kvgraft.miss.reason": misses[0] if misses else None,
        "kvgraft.risk.status": reports[0].risk.status.value,
    }


def _class_of(report: GraftReport) -> ReuseClass:
    """Return the class of a report with spans: that of its copies, where there are any."""
    copies = grafted_spans(report)
    return reuse_class(copies) if copies else ReuseClass.CONTINUED


def _common(values: Set[str]) -> str | None:
    """Return the value that several prompts have in common, or that theirs are mixed; None where no prompt has one."""
    return _MIXED if len(values) > 1 else next(iter(values), None)


def _stage_of(stage: str, report: GraftReport) -> dict[str, Value | None]:
    if stage == "lookup":
        return {
            "kvgraft.lookup.ms": report.timings_ms.get("lookup"),
            "kvgraft.reuse.exact_tokens": int(report.exact_tokens),
            "kvgraft.miss.reason": None if report.miss is None else report.miss.reason.value,
        }
    if stage == "graft":
        return {
            "kvgraft.graft.ms": report.timings_ms.get("graft"),
            "kvgraft.read.ms": report.timings_ms.get("read"),
            "kvgraft.reuse.spans": len(grafted_spans(report)),
        }
    return {"kvgraft.reuse.computed_tokens": int(report.computed_tokens)} if stage == "prefill" else {}


def _told(found: Mapping[str, Value | None]) -> Attributes:
    return {name: value for name, value in found.items() if value is not None}
