"""The metrics of reuse: one set of names, labels and meanings. Engines only expose them.

`samples` turns a report into counts. An engine adapter makes its metrics library's counters, gauges and histograms from the
`Metric`s and feeds them. Labels are few and fixed: never a tenant or a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.types import MissReason, RepairTime

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvgraft.types import GraftReport, HealingReport, RepairReport

_QUICK_S = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)
"""Buckets of what a client waits for."""
_REJECTED = {
    MissReason.NOT_WORTH_IT,
    MissReason.MODEL_REFUSED,
    MissReason.NO_ROOM,
    MissReason.DEADLINE,
    MissReason.RISK,
}
_FAILED = {MissReason.ERROR, MissReason.POLICY_ERROR}


class MetricKind(StrEnum):
    """Kind of a metric in a metrics library."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as every engine exposes it."""

    name: str
    """Without the prefix `kvgraft:` and without suffixes that libraries add."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    """Beside those that the engine gives all of its metrics."""
    buckets: tuple[float, ...] = ()
    """Of a histogram, in seconds."""

    @property
    def full_name(self) -> str:
        """With the prefix."""
        return f"kvgraft:{self.name}"


class Sample(NamedTuple):
    """A value of a metric, to be added to a counter, observed by a histogram or set on a gauge."""

    metric: Metric
    labels: tuple[str, ...]
    value: float


PROMPT_TOKENS = Metric(
    "prompt_tokens",
    MetricKind.COUNTER,
    "Prompt tokens, once per request. kind: prefix (exact), continued (approximate, as an earlier request was answered "
    "from), segment (shifted), substituted (another text's), recomputed (reused and computed again), fresh (the rest). "
    "outcome of the request: approx (something was grafted or continued), exact, rejected (a graft was refused), fallback "
    "(reuse failed)",
    ("kind", "outcome"),
)
GRAFTED_REQUESTS = Metric("grafted_requests", MetricKind.COUNTER, "Requests with a graft")
REPAIRS = Metric(
    "repairs",
    MetricKind.COUNTER,
    "Grafts of which tokens are computed again. time: before or after the first token. outcome: repaired, exact (nothing "
    "approximate was left in the end), none (the answer ended before the repair)",
    ("time", "outcome"),
)
GRAFT_MISSES = Metric(
    "graft_misses", MetricKind.COUNTER, f"Requests without a graft. reason: {', '.join(MissReason)}", ("reason",)
)
GRAFT_ERRORS = Metric("graft_errors", MetricKind.COUNTER, "Failures of reuse that became misses; the log names them")
LOOKUP_SECONDS = Metric("lookup_seconds", MetricKind.HISTOGRAM, "Finding and planning reuse, per request", (), _QUICK_S)
GRAFT_SECONDS = Metric(
    "graft_seconds", MetricKind.HISTOGRAM, "Copying and rotating K/V, per grafted request", (), _QUICK_S
)
RECOMPUTE_SECONDS = Metric(
    "recompute_seconds",
    MetricKind.HISTOGRAM,
    "Passes over gaps and chosen tokens beside the engine's own, per grafted request",
    (),
    _QUICK_S,
)
VERIFIED_REQUESTS = Metric(
    "verified_requests",
    MetricKind.COUNTER,
    "Requests with reuse=verified that were drafted from a graft; on the embedded engine only",
)
DRAFTED_TOKENS = Metric("drafted_tokens", MetricKind.COUNTER, "Provisional tokens that verified requests drew")
RETRACTED_TOKENS = Metric("retracted_tokens", MetricKind.COUNTER, "Of them, those that a full prefill does not give")
PROVISIONAL_SECONDS = Metric(
    "time_to_first_provisional_token_seconds",
    MetricKind.HISTOGRAM,
    "From arrival to the first provisional token",
    (),
    LATENCY_S,
)
DONORS = Metric("donors", MetricKind.GAUGE, "Donors in all tiers")
DONOR_TOKENS = Metric("donor_tokens", MetricKind.GAUGE, "Tokens of donors in all tiers")
DONOR_HOST_BYTES = Metric("donor_host_bytes", MetricKind.GAUGE, "Bytes of donors in host memory, on the fullest worker")
DONOR_HOST_LIMIT_BYTES = Metric(
    "donor_host_limit_bytes", MetricKind.GAUGE, "Bytes that donors may take in the host memory of a worker"
)
GRAFT_REFUSED = Metric(
    "graft_refused",
    MetricKind.GAUGE,
    "1 where this model or server is refused grafts and the log says why, 0 elsewhere",
)
PROPOSALS = Metric(
    "proposals",
    MetricKind.COUNTER,
    "Work of an embedder, on the embedded engine only. what: donors (named), tokens (matched only thanks to that), "
    "embedded, dropped, errors (texts)",
    ("what",),
)
SEMANTIC_CALLS = Metric(
    "semantic_calls",
    MetricKind.COUNTER,
    "Calls of a semantic provider. outcome: hit (its text stands in), miss, timeout, error",
    ("outcome",),
)
STORE_READS = Metric(
    "store_reads",
    MetricKind.COUNTER,
    "Reads of stored donors. outcome: hit, missing, corrupt, failed, refused (not begun), cancelled, late, look_failed "
    "(the store could not be asked what it has)",
    ("store", "outcome"),
)
STORE_READ_BYTES = Metric("store_read_bytes", MetricKind.COUNTER, "Bytes of stored donors that arrived", ("store",))
STORE_READ_SECONDS = Metric(
    "store_read_seconds", MetricKind.HISTOGRAM, "Waiting of a request for K/V from stores", (), _QUICK_S
)
STORE_WRITES = Metric(
    "store_writes",
    MetricKind.COUNTER,
    "Donors offered to stores. outcome: stored, known (the store had it), dropped (too much waited, or their K/V were "
    "gone), refused (it is full), failed",
    ("store", "outcome"),
)
STORE_WRITTEN_BYTES = Metric("store_written_bytes", MetricKind.COUNTER, "Bytes of donors written to stores", ("store",))
STORE_RESTING = Metric(
    "store_resting",
    MetricKind.GAUGE,
    "1 from a read that failed or was late until the next one that arrives",
    ("store",),
)
STORE_COLD_DONORS = Metric("store_cold_donors", MetricKind.GAUGE, "Donors whose K/V lie in stores alone")
RISK_AUDITS = Metric(
    "risk_audits",
    MetricKind.GAUGE,
    "Grafted requests compared with full prefill at the present notch, on the embedded engine with a calibration. part "
    "of the answer: first (the first token, drawn before the repair), later, whole (answers that waited for it)",
    ("reuse_class", "part", "notch", "status"),
)
RISK_CERTIFIED = Metric(
    "risk_certified",
    MetricKind.GAUGE,
    "Mean loss that audits have certified; 1 where none is",
    ("reuse_class", "part"),
)

METRICS = tuple(value for value in globals().values() if isinstance(value, Metric))
"""All of them, in the order of the documentation."""

_STEPS = {
    "lookup": LOOKUP_SECONDS,
    "graft": GRAFT_SECONDS,
    "recompute": RECOMPUTE_SECONDS,
    "read": STORE_READ_SECONDS,
}


def samples(report: GraftReport) -> Iterator[Sample]:
    """Yield what a request that ended adds to the metrics."""
    outcome = token_outcome(report)
    for kind, count in token_kinds(report).items():
        yield Sample(PROMPT_TOKENS, (kind, outcome), count)
    if report.healing is not None:
        yield from _healing_samples(report.healing)
    elif report.miss is None:
        yield Sample(GRAFTED_REQUESTS, (), 1)
    else:
        yield Sample(GRAFT_MISSES, (report.miss.reason.value,), 1)
    if report.repair is not None:
        yield Sample(REPAIRS, (report.repair.time.value, _repair_outcome(report.repair)), 1)
    has_graft = bool(report.spans) or report.healing is not None
    for step, milliseconds in report.timings_ms.items():
        metric = _STEPS.get(step)
        if metric is not None and (step in ("lookup", "read") or has_graft):
            yield Sample(metric, (), milliseconds / 1e3)


def _repair_outcome(repair: RepairReport) -> str:
    """Return what a repair came to, the label `outcome` of repairs: `none` where the answer ended before it."""
    if repair.exact_from_token is not None:
        return "exact"
    return "none" if repair.from_token is None else "repaired"


def _healing_samples(healing: HealingReport) -> Iterator[Sample]:
    yield Sample(VERIFIED_REQUESTS, (), 1)
    yield Sample(DRAFTED_TOKENS, (), healing.drafted_tokens)
    yield Sample(RETRACTED_TOKENS, (), healing.retracted_tokens)
    if healing.drafted_tokens:
        yield Sample(PROVISIONAL_SECONDS, (), healing.first_provisional_s)


def donor_samples(num_donors: int, num_tokens: int, host_bytes: int) -> tuple[Sample, ...]:
    """Return the gauges of how many donors there are, and of their bytes in host memory on the fullest worker."""
    return (
        Sample(DONORS, (), num_donors),
        Sample(DONOR_TOKENS, (), num_tokens),
        Sample(DONOR_HOST_BYTES, (), host_bytes),
    )


def semantic_samples(outcomes: Mapping[str, int]) -> Iterator[Sample]:
    """Yield what new calls of a semantic provider add to their metric, by outcome."""
    for outcome, count in outcomes.items():
        yield Sample(SEMANTIC_CALLS, (outcome,), count)


def num_failed(outcomes: Mapping[str, int]) -> int:
    """Return how many of these calls are failures of reuse, which each engine counts among its own."""
    return outcomes.get("timeout", 0) + outcomes.get("error", 0)


def token_kinds(report: GraftReport) -> dict[str, int]:
    """Prompt tokens by how they came about, under the names of the label `kind`."""
    kinds = {
        "prefix": report.exact_tokens,
        "continued": report.continued_tokens,
        "segment": report.shifted_tokens,
        "substituted": report.substituted_tokens,
        "recomputed": report.recomputed_tokens,
        "fresh": report.computed_tokens - report.recomputed_tokens,
    }
    return {kind: max(0, count) for kind, count in kinds.items()}


def token_outcome(report: GraftReport) -> str:
    """Return how a request's tokens relate to a full prefill, the label `outcome` of prompt tokens.

    `approx`: some were grafted, and of the answer the first token at least was drawn from them. `fallback`: reuse failed.
    `rejected`: a match was found or looked for and refused. `exact`: the rest.
    """
    is_first_token_approximate = report.repair is not None and report.repair.time is RepairTime.AFTER
    is_approximate = report.continued_tokens or report.shifted_tokens or report.substituted_tokens
    if is_approximate or is_first_token_approximate:
        return "approx"
    if report.miss is not None and report.miss.reason in _FAILED:
        return "fallback"
    if report.miss is not None and report.miss.reason in _REJECTED:
        return "rejected"
    return "exact"
