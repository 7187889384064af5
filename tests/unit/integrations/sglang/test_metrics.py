"""SGLang's endpoint shows what all engines count, under the same names."""

from __future__ import annotations

from functools import partial

import pytest

from kvgraft.reuse.metrics import GRAFT_ERRORS, METRICS, Sample, donor_samples, samples
from kvgraft.reuse.store_samples import StoreSamples
from kvgraft.types import GraftReport, Miss, MissReason, StoreCounts

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def make_sample(monkeypatch):
    """Make metrics in a registry of their own; returns them and what reads a value."""
    from kvgraft.integrations.sglang.reporting import metrics

    def make(**options):
        registry = prometheus_client.CollectorRegistry()
        for name in ("Counter", "Gauge", "Histogram"):
            monkeypatch.setattr(metrics, name, partial(getattr(prometheus_client, name), registry=registry))
        made = metrics.SGLangMetrics("m", 9000, **options)
        return made, lambda name, **labels: registry.get_sample_value(name, {**labels, "model_name": "m"})

    return make


@pytest.fixture
def sample(make_sample):
    return make_sample()


def test_reports_errors_and_donors_are_shown(sample):
    metrics, value = sample
    report = GraftReport(10, 2, computed_tokens=8, miss=Miss(MissReason.NO_MATCH), timings_ms={"lookup": 3.0})
    metrics.record([*samples(report), Sample(GRAFT_ERRORS, (), 1), *donor_samples(3, 400, 5000)])
    assert value("kvgraft:live") == 1
    assert value("kvgraft:prompt_tokens_total", kind="fresh", outcome="exact") == 8
    assert value("kvgraft:graft_misses_total", reason="no_match") == 1
    assert value("kvgraft:graft_errors_total") == 1
    assert value("kvgraft:lookup_seconds_sum") == pytest.approx(0.003)
    assert [value(f"kvgraft:{name}") for name in ("donors", "donor_tokens", "donor_host_bytes")] == [3, 400, 5000]
    assert value("kvgraft:donor_host_limit_bytes") == 9000


def test_what_has_not_happened_is_0(sample):
    _, value = sample
    assert value("kvgraft:graft_errors_total") == value("kvgraft:lookup_seconds_count") == value("kvgraft:donors") == 0
    assert value("kvgraft:graft_refused") == 0


def test_a_refused_server_says_so(make_sample):
    """It runs SGLang's own cache, and nothing else would tell its operator."""
    _, value = make_sample(is_refused=True)
    assert (value("kvgraft:graft_refused"), value("kvgraft:live")) == (1, 0)


def test_counts_of_schedulers_add_up_and_bytes_are_of_the_fullest(sample):
    metrics, _ = sample
    modes = {
        name: family._multiprocess_mode for name, family in metrics._families.by_name.items() if family._type == "gauge"
    }
    assert {name for name, mode in modes.items() if mode == "livesum"} == {
        "donors",
        "donor_tokens",
        "store_cold_donors",
    }
    assert set(modes.values()) == {"livesum", "livemax"}


def test_every_metric_of_all_engines_is_made(sample):
    metrics, _ = sample
    assert set(metrics._families.by_name) == {metric.name for metric in METRICS}


def test_stores_are_shown_as_totals(sample):
    (metrics, value), totals = sample, StoreSamples()
    for hits in (2, 5):
        counts = [StoreCounts("file", {"hit": hits}, 100 * hits, {"stored": 1}, 700, is_resting=hits == 5)]
        metrics.record(totals.changes(counts, 9))
    assert value("kvgraft:store_reads_total", store="file", outcome="hit") == 5
    assert value("kvgraft:store_read_bytes_total", store="file") == 500
    assert value("kvgraft:store_writes_total", store="file", outcome="stored") == 1
    assert value("kvgraft:store_resting", store="file") == 1
    assert value("kvgraft:store_cold_donors") == 9
