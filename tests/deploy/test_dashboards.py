"""Every query of the dashboards asks for what servers expose, and the files are what the script writes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.promql import base_name, problems, read

from kvgraft.reuse.metrics import METRICS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "grafana" / "dashboards"
ENGINES = ("embedded", "vllm", "sglang")
EMBEDDED_ONLY = {
    "verified_requests",
    "drafted_tokens",
    "retracted_tokens",
    "time_to_first_provisional_token_seconds",
    "proposals",
    "risk_audits",
    "risk_certified",
}
"""Registered by all engines, for which there is one list, and moved by one."""

REUSE_SERIES = {
    metric.full_name + suffix
    for metric in METRICS
    for suffix in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}[metric.kind]
}

each_engine = pytest.mark.parametrize("engine", ENGINES)


def dashboard(engine):
    return json.loads((FOLDER / f"{engine}.json").read_text())


def panels(engine):
    return [panel for panel in dashboard(engine)["panels"] if panel["type"] != "row"]


def queries(engine):
    """Queries with the names of their panels."""
    return [(panel["title"], target["expr"]) for panel in panels(engine) for target in panel["targets"]]


def names_asked_for(engine):
    return {selector.metric for _, text in queries(engine) for selector in read(text).selectors}


class TestReader:
    def test_selectors_and_what_stands_around_them(self):
        query = read('sum by (a, b) (rate(x:y_total{k="v",q=~"a|b{}"}[5m])) / (max(z) > 0) unless on (c) up == 1')
        assert [s.metric for s in query.selectors] == ["x:y_total", "z", "up"]
        assert query.selectors[0].matchers == (("k", "=", "v"), ("q", "=~", "a|b{}"))
        assert [s.function for s in query.selectors] == ["rate", "max", ""]
        assert [s.has_range for s in query.selectors] == [True, False, False]
        assert query.groupings == {"a", "b", "c"}

    @pytest.mark.parametrize("text", ["sum(x", "sum(x))", "x{a}", "x ? y"])
    def test_what_is_no_query_is_refused(self, text):
        with pytest.raises(ValueError, match=r"\w"):
            read(text)

    def test_problems_are_found(self, embedded):
        assert problems("sum(kvgraft:no_such_thing{})", embedded) == ["no metric kvgraft:no_such_thing"]
        assert problems('sum(kvgraft:kv_slots{colour="red"})', embedded) == ["kvgraft:kv_slots has no label colour"]
        assert problems("sum(kvgraft:steps_total)", embedded) == ["kvgraft:steps_total is a counter, in sum"]
        assert problems("sum(rate(kvgraft:steps[5m]))", embedded) == ["no metric kvgraft:steps"]
        assert problems("sum(rate(kvgraft:donors[5m]))", embedded) == ["kvgraft:donors is a gauge, in rate"]
        assert problems("sum by (le) (rate(kvgraft:steps_total[5m]))", embedded) == [
            "kvgraft:steps_total has no buckets"
        ]


@each_engine
def test_every_query_asks_for_what_is_there(engine, exposed):
    wrong = {(title, text): found for title, text in queries(engine) if (found := problems(text, exposed))}
    assert not wrong


@each_engine
def test_variables_ask_for_what_is_there(engine, exposed):
    variables = dashboard(engine)["templating"]["list"]
    assert [variable["name"] for variable in variables][:4] == ["datasource", "job", "model_name", "instance"]
    earlier = set()
    for variable in variables[1:]:
        metric, matchers, label = re.fullmatch(
            r"label_values\(([\w:]+)(?:\{(.*)\})?, (\w+)\)", variable["query"]["query"]
        ).groups()
        _, _, labels = exposed.family(metric)
        assert label == variable["name"]
        assert label in labels
        assert set(re.findall(r"\$(\w+)", matchers or "")) <= earlier
        earlier.add(label)


@each_engine
def test_every_variable_narrows_every_query(engine):
    chosen = {variable["name"] for variable in dashboard(engine)["templating"]["list"][1:]}
    for title, text in queries(engine):
        for selector in read(text).selectors:
            asked = {label for label, sign, value in selector.matchers if (sign, value) == ("=~", f"${label}")}
            assert asked == chosen, (title, selector)


@each_engine
def test_what_may_be_divided_by_nothing_is_guarded(engine):
    for title, text in queries(engine):
        if "/" in text:
            assert re.search(r"/ \(.* > 0\)", text), title


@each_engine
def test_panels_name_their_metrics_and_say_what_no_traffic_is(engine):
    for panel in panels(engine):
        for target in panel["targets"]:
            for selector in read(target["expr"]).selectors:
                assert f"`{base_name(selector.metric)}`" in panel["description"], panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["noValue"] in {"No traffic", "No store", "No embedder", "No provider", "No calibration", "None"}
        assert any(one["options"].get("match") == "null+nan" for one in defaults["mappings"])


@each_engine
def test_panels_lie_beside_one_another(engine):
    places = set()
    for panel in dashboard(engine)["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & places, panel["title"]
        assert at["x"] + at["w"] <= 24
        places |= cells
    ids = [panel["id"] for panel in dashboard(engine)["panels"]]
    assert len(set(ids)) == len(ids)


def test_values_of_labels_that_queries_ask_for_occur(embedded):
    """Of those that a server shows from its first request on; failures, and what needs a calibration, do not occur here."""
    asked = [
        (selector.metric, label, value)
        for _, text in queries("embedded")
        for selector in read(text).selectors
        for label, sign, value in selector.matchers
        if label in {"kind", "holder", "pool", "phase"} and sign in {"=", "=~"}
    ]
    assert {label for _, label, _ in asked} >= {"kind", "holder"}
    for metric, label, value in asked:
        assert set(value.split("|")) <= embedded.values(metric, label), (metric, label)


def test_the_server_has_reused_text(embedded):
    """Or it would show nothing that is worth a look."""
    totals = {
        s.labels["kind"]: s.value for s in embedded.samples if s.name == "kvgraft:prompt_tokens_total" and s.value
    }
    assert totals["segment"] > 0


def test_everything_about_reuse_is_on_a_panel():
    for engine in ENGINES:
        asked = {base_name(name).removesuffix("_total") for name in names_asked_for(engine)}
        left_out = set() if engine == "embedded" else EMBEDDED_ONLY
        assert {metric.full_name for metric in METRICS if metric.name not in left_out} <= asked, engine


def test_names_and_labels_of_reuse_are_the_same_in_all_engines(request):
    found = {}
    for engine in ENGINES:
        exposed = request.getfixturevalue(engine)
        found[engine] = {
            metric.name: (
                exposed.families[metric.full_name][0],
                set(exposed.families[metric.full_name][1]) - {"engine"},
            )
            for metric in METRICS
        }
    assert found["embedded"] == found["vllm"] == found["sglang"]


def reuse_panels(engine):
    """Panels that ask for nothing but reuse: description and queries by title, without the label of one engine."""
    found = {}
    for panel in panels(engine):
        texts = [target["expr"].replace(',engine=~"$engine"', "") for target in panel["targets"]]
        if {selector.metric for text in texts for selector in read(text).selectors} <= REUSE_SERIES:
            found[panel["title"]] = (panel["description"], texts)
    return found


def test_panels_of_reused_text_are_the_same_in_all_engines():
    embedded, vllm, sglang = map(reuse_panels, ENGINES)
    assert {"Prompt tokens by class", "Misses by reason", "Donors", "Failures of reuse", "Tokens saved"} <= set(vllm)
    assert vllm == sglang
    assert {title: embedded.get(title) for title in vllm} == vllm


def test_files_are_what_the_script_writes():
    script = ROOT / "tools" / "dashboards" / "make.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
