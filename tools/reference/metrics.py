"""docs/reference/metrics.md: what each metric is, from the registry of a server that has served nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.observability.prometheus import PrometheusRecorder
from kvgraft.reuse.metrics import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD = """\
# Metrics

On `/metrics` of every engine, in the Prometheus format ([monitoring.md](../monitoring.md): dashboards, alerts). Counters
end in `_total`; histograms have `_bucket`, `_sum` and `_count`. All have the label `model_name`, in vLLM `engine` besides;
none names a tenant or a request.

## Reuse, in all engines

"""
_COLUMNS = "| metric | kind | meaning |\n|---|---|---|\n"
_EMBEDDED = """
## The embedded server alone

"""
_END = """
Besides, `kvgraft_build_info` and, on Linux, `process_*`. SGLang has `kvgraft:live`, 1 while the backend serves. The router's
begin with `kvgraft_router:` ([routing.md](../routing.md)).
"""


def metrics_page() -> str:
    """Return the page."""
    reuse = {metric.full_name for metric in METRICS}
    rows = list(_rows())
    shared = "".join(row for name, row in rows if name in reuse)
    embedded = "".join(row for name, row in rows if name not in reuse)
    return _HEAD + _COLUMNS + shared + _EMBEDDED + _COLUMNS + embedded + _END


def _rows() -> Iterator[tuple[str, str]]:
    """Yield name and row of every family of ours, in the order in which they were registered."""
    registry = PrometheusRecorder("model").registry
    for collector in registry._collector_to_names:
        for family in getattr(collector, "describe", list)():  # the process's collector describes nothing
            if family.name.startswith("kvgraft:"):
                labels = [label for label in getattr(collector, "_labelnames", ()) if label != "model_name"]
                name = family.name + (f"{{{','.join(labels)}}}" if labels else "")
                yield family.name, f"| `{name}` | {family.type} | {family.documentation} |\n"
