"""Counts of reuse, through vLLM's connector statistics to its log and its Prometheus endpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvgraft.reuse.metrics import token_kinds

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvgraft.integrations.vllm.messages import GraftOutcome
    from kvgraft.types import GraftReport

_KINDS = ("prefix", "segment", "recomputed", "fresh")
_GAUGES = ("donors", "donor_tokens", "host_bytes")
_BUCKETS_S = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)


class GraftStats(KVConnectorStats):
    """Counters since the last report in `data`: plain numbers and lists of seconds, for they travel as JSON."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew; gauges stay as they are."""
        self.data = {name: value for name, value in self.data.items() if name in _GAUGES}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(name not in _GAUGES for name in self.data)

    def aggregate(self, other: KVConnectorStats) -> GraftStats:
        """Add another object's counts to this one; gauges take the newer value."""
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES or name not in self.data else self.data[name] + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line of the log."""
        requests = sum(value for name, value in self.data.items() if name.startswith("requests/"))
        tokens = {kind: self.data.get(f"tokens/{kind}", 0) for kind in _KINDS}
        reused = tokens["prefix"] + tokens["segment"]
        return {
            "kvgraft requests": requests,
            "grafted": self.data.get("requests/graft", 0),
            "reused tokens": reused,
            "reused %": round(100 * reused / max(1, sum(tokens.values())), 1),
            "grafted tokens": tokens["segment"],
            "recomputed tokens": tokens["recomputed"],
            "errors": self.data.get("errors", 0),
            "donors": self.data.get("donors", 0),
            "host MiB": round(self.data.get("host_bytes", 0) / 2**20, 1),
        }

    def taken(self, **gauges: int) -> GraftStats | None:
        """Hand the counts over and begin anew; None for nothing."""
        if self.is_empty():
            return None
        handed = GraftStats({**self.data, **gauges})
        self.reset()
        return handed

    def count_request(self, report: GraftReport) -> None:
        """A request ended."""
        self._add(f"requests/{'graft' if report.miss is None else report.miss.reason.value}", 1)
        for kind, count in token_kinds(report).items():
            self._add(f"tokens/{kind}", count)

    def count_lookup(self, milliseconds: float) -> None:
        """A prompt was looked up."""
        self._add("lookup_seconds", [milliseconds / 1e3])

    def count_graft(self, outcome: GraftOutcome) -> None:
        """Workers ended a graft."""
        self._add("inject_seconds", [outcome.inject_ms / 1e3])
        self._add("recompute_seconds", [outcome.compute_ms / 1e3])

    def count_error(self) -> None:
        """Reuse failed for a request, which is computed."""
        self._add("errors", 1)

    def _add(self, name: str, value: Any) -> None:  # noqa: ANN401 - a number or a list
        self.data[name] = self.data[name] + value if name in self.data else value


class GraftPromMetrics(KVConnectorPromMetrics):
    """`kvgraft:*` metrics of the vLLM server; labels are fixed, never a tenant or a request."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labels = list(labelnames)
        self._tokens = self._counter_cls(
            name="kvgraft:prompt_tokens",
            documentation="Prompt tokens by where their K/V came from.",
            labelnames=[*labels, "kind"],
        )
        self._requests = self._counter_cls(
            name="kvgraft:requests",
            documentation="Requests by what became of them: graft, or why nothing was grafted.",
            labelnames=[*labels, "outcome"],
        )
        self._errors = self._counter_cls(
            name="kvgraft:graft_errors",
            documentation="Failures of reuse; the requests were computed.",
            labelnames=labels,
        )
        self._seconds = {
            name: self._histogram_cls(name=f"kvgraft:{name}", documentation=text, labelnames=labels, buckets=_BUCKETS_S)
            for name, text in (
                ("lookup_seconds", "Seconds of finding donors for a prompt."),
                ("inject_seconds", "Seconds of copying and rotating the K/V of a graft."),
                ("recompute_seconds", "Seconds of computing the gaps and chosen tokens of a graft."),
            )
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"kvgraft:{name}", documentation=text, labelnames=labels, multiprocess_mode="all"
            )
            for name, text in (
                ("donors", "Texts whose K/V are kept."),
                ("donor_tokens", "Tokens of these texts."),
                ("host_bytes", "Host memory of these texts on the fullest worker."),
            )
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record what `GraftStats.data` held."""
        values = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            family, _, label = name.partition("/")
            if family == "tokens":
                self._tokens.labels(*values, label).inc(value)
            elif family == "requests":
                self._requests.labels(*values, label).inc(value)
            elif name == "errors":
                self._errors.labels(*values).inc(value)
            elif name in self._seconds:
                for seconds in value:
                    self._seconds[name].labels(*values).observe(seconds)
            elif name in self._gauges:
                self._gauges[name].labels(*values).set(value)
