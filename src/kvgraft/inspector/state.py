"""The few figures of a metrics page that the inspector shows; their names mean the same in all engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.samples import Sample

_GAUGES = {
    "kvgraft:num_requests_running": "running",
    "vllm:num_requests_running": "running",
    "sglang:num_running_reqs": "running",
    "kvgraft:num_requests_waiting": "waiting",
    "vllm:num_requests_waiting": "waiting",
    "sglang:num_queue_reqs": "waiting",
    "kvgraft:donors": "donors",
    "kvgraft:donor_tokens": "donor_tokens",
    "kvgraft:donor_host_bytes": "host_bytes",
    "kvgraft:donor_host_limit_bytes": "host_limit_bytes",
    "kvgraft:sessions": "sessions",
    "kvgraft:graft_refused": "refused",
    "kvgraft:graft_errors_total": "errors",
    "kvgraft:heal_candidates": "heal_candidates",
    "kvgraft:healed_tokens_total": "healed_tokens",
}
_BY_LABEL = {
    "kvgraft:kv_slots": ("slots", "holder"),
    "kvgraft:prompt_tokens_total": ("tokens", "kind"),
    "kvgraft:graft_misses_total": ("misses", "reason"),
    "kvgraft:requests_total": ("requests", "outcome"),
}
_RISK = {"kvgraft:risk_audits": "audits", "kvgraft:risk_certified": "certified"}
NAMES = (*_GAUGES, *_BY_LABEL, *_RISK)
"""Of the samples that are shown."""


def state_of(samples: Iterable[Sample]) -> dict[str, Any]:
    """Pick figures out of metrics. Those of several models or ranks are added up; what is not there is left out.

    Returns:
        Numbers by name, numbers by name and label (`slots`, `tokens`, `misses`, `requests`), and `risk` by reuse class and
        part of the answers.
    """
    found: dict[str, Any] = {}
    risk: dict[str, dict[str, Any]] = {}
    for sample in samples:
        if sample.name in _GAUGES:
            name = _GAUGES[sample.name]
            found[name] = found.get(name, 0) + sample.value
        elif sample.name in _BY_LABEL:
            name, label = _BY_LABEL[sample.name]
            counts = found.setdefault(name, {})
            key = sample.labels.get(label, "")
            counts[key] = counts.get(key, 0) + sample.value
        elif sample.name in _RISK:
            kind = " ".join(sample.labels[name] for name in ("reuse_class", "part") if name in sample.labels)
            facts = risk.setdefault(kind, {})
            facts[_RISK[sample.name]] = sample.value
            facts |= {name: sample.labels[name] for name in ("notch", "status") if name in sample.labels}
    if risk:
        found["risk"] = risk
    return found


def read_samples(exposition: str) -> list[Sample]:
    """Samples of a metrics page named in `NAMES`; its many other buckets would take long to read."""
    lines = [line for line in exposition.splitlines() if line.startswith(NAMES) and _name_of(line) in NAMES]
    try:
        return [
            sample for family in text_string_to_metric_families("\n".join(lines) + "\n") for sample in family.samples
        ]
    except ValueError:
        return []  # it is no metrics page


def _name_of(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]
