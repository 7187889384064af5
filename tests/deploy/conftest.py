"""What servers expose: one that runs here, and what kvgraft registers in vLLM's and SGLang's endpoints."""

from __future__ import annotations

import asyncio
import json
from functools import partial

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.deploy.engine_metrics import SGLANG, VLLM
from tests.unit.server.conftest import exchange

from kvgraft.config import ServerConfig
from kvgraft.engine.async_llm import AsyncLLM
from kvgraft.integrations.sglang.reporting import metrics as sglang_metrics
from kvgraft.observability.prometheus import PrometheusRecorder
from kvgraft.reuse.families import MetricFamilies
from kvgraft.server import create_app

_SCRAPED = ("job", "instance")
DOCUMENT = "def area(width, height):\n    return width * height\n\n\nclass Box:\n    sides = 6\n" * 4
REQUESTS = (
    {"prompt": DOCUMENT},
    {"prompt": "import math\n\n\n" + DOCUMENT},
    {"prompt": "import json\n\n\n" + DOCUMENT, "kvgraft": {"reuse": "verified"}},
    {"prompt": ""},
)
"""Text, the same text elsewhere, as drafts, and a mistake."""


class Exposed:
    """Families of metrics by name (of counters without `_total`): kind and labels, and the samples that there are."""

    def __init__(self, families, samples=()):
        self.families = families
        self.samples = list(samples)

    def family(self, metric):
        """Kind, suffix and labels of a series that a query names, or None."""
        for suffix in ("", "_total", "_bucket", "_sum", "_count"):
            name = metric.removesuffix(suffix) if suffix else metric
            if metric.endswith(suffix) and name in self.families:
                kind, labels = self.families[name]
                wanted = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[kind]
                if suffix in wanted:
                    bounds = ("le",) if suffix == "_bucket" else ()
                    return kind, suffix, {*labels, *bounds, *_SCRAPED}
        return None

    def values(self, metric, label):
        """What a label of a series is, in the samples at hand."""
        return {sample.labels[label] for sample in self.samples if sample.name == metric and label in sample.labels}


def of_registry(registry):
    """Families of a registry of `prometheus_client`, those without samples too."""
    found = {}
    for collector in set(registry._collector_to_names):
        if hasattr(collector, "_labelnames"):
            found[collector._name] = (collector._type, collector._labelnames)
    return found


async def _scrape(folder):
    config = ServerConfig(num_slots=4000, store=f"file:{folder}", embedder="minhash", min_run=16)
    recorder = PrometheusRecorder("graft-tiny")
    llm = AsyncLLM(config.model, config, recorder)
    app = create_app(llm, config, recorder)
    try:
        headers = [(b"content-type", b"application/json")]
        for request in REQUESTS:
            body = json.dumps({"max_tokens": 3, "temperature": 0} | request).encode()
            await exchange(app, "POST", "/v1/completions", headers=headers, body=[body])
        text = (await exchange(app, "GET", "/metrics")).body.decode()
    finally:
        await llm.close()
    return recorder.registry, text


@pytest.fixture(scope="session")
def embedded(tmp_path_factory):
    """A server that has answered. What it names has a type; labels of what has no sample yet are read from its registry."""
    registry, text = asyncio.run(_scrape(tmp_path_factory.mktemp("store")))
    shown = {family.name: family for family in text_string_to_metric_families(text)}
    known = of_registry(registry)
    families = {}
    for name, family in shown.items():
        labels = known[name][1] if name in known else {label for sample in family.samples for label in sample.labels}
        families[name] = (family.type, tuple(labels))
    return Exposed(families, [sample for family in shown.values() for sample in family.samples])


@pytest.fixture(scope="session")
def vllm():
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    made = (partial(kind, registry=registry) for kind in kinds)
    MetricFamilies(*made, ["model_name", "engine"], gauge_mode=lambda _: "mostrecent").begin(("m", "0"))
    return Exposed(of_registry(registry) | VLLM)


@pytest.fixture(scope="session")
def sglang():
    registry = prometheus_client.CollectorRegistry()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("Counter", "Gauge", "Histogram"):
            patch.setattr(sglang_metrics, name, partial(getattr(prometheus_client, name), registry=registry))
        sglang_metrics.SGLangMetrics("m")
    theirs = {
        name.removesuffix("_total") if kind == "counter" else name: (kind, labels)
        for name, (kind, labels) in SGLANG.items()
    }
    return Exposed(of_registry(registry) | theirs)


@pytest.fixture
def exposed(request, engine):
    return request.getfixturevalue(engine)
