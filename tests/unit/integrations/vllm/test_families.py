"""What vLLM's endpoint shows of reuse, in the metrics library that vLLM passes."""

from __future__ import annotations

from functools import partial

import prometheus_client
import pytest

from kvgraft.reuse.families import MetricFamilies
from kvgraft.reuse.metrics import METRICS


@pytest.fixture
def registry():
    return prometheus_client.CollectorRegistry()


def make_families(registry, engines=("0", "1")):
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    counter, gauge, histogram = (partial(kind, registry=registry) for kind in kinds)
    made = MetricFamilies(counter, gauge, histogram, ["model_name", "engine"], gauge_mode=lambda _: "mostrecent")
    for engine in engines:
        made.begin(("m", engine))
    return made.by_name


def test_every_metric_of_all_engines_is_made(registry):
    assert set(make_families(registry)) == {metric.name for metric in METRICS}


def test_counters_are_0_for_every_engine_before_anything_happens(registry):
    make_families(registry)
    for engine in ("0", "1"):
        assert registry.get_sample_value("kvgraft:graft_errors_total", {"model_name": "m", "engine": engine}) == 0
    assert registry.get_sample_value("kvgraft:lookup_seconds_count", {"model_name": "m", "engine": "1"}) == 0


def test_gauges_of_several_api_servers_are_the_newest_and_have_no_label_of_a_process(registry):
    assert {family._multiprocess_mode for family in make_families(registry).values() if family._type == "gauge"} == {
        "mostrecent"
    }
