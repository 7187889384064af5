"""The rules ask for what servers expose and say what to do; Prometheus' own tool tries them where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.deploy.conftest import Exposed
from tests.deploy.promql import problems
from tests.deploy.test_dashboards import ENGINES, queries

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "prometheus"
GROUPS = {group["name"]: group["rules"] for group in yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]}
ALERTS = [rule for rules in GROUPS.values() for rule in rules if "alert" in rule]
RECORDED = {
    rule["record"]: ("gauge", ("model_name",)) for rules in GROUPS.values() for rule in rules if "record" in rule
}
OF_ONE_ENGINE = {"kvgraft_embedded": ("embedded",)}
"""Groups that not all engines can feed."""

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (apt install prometheus)"
)


def promtool(*words):
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_every_rule_asks_for_what_is_there(group, request):
    for engine in OF_ONE_ENGINE.get(group, ENGINES):
        exposed = request.getfixturevalue(engine)
        known = Exposed(exposed.families | RECORDED | {"up": ("gauge", ())})
        wrong = {rule["expr"]: found for rule in GROUPS[group] if (found := problems(rule["expr"], known))}
        assert not wrong, engine


def test_alerts_say_how_bad_it_is_and_what_to_do():
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    for rule in ALERTS:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["runbook"].endswith("."), rule["alert"]


def test_runbooks_name_pages_that_exist():
    pages = re.findall(r"docs/[\w/]+\.md", (FOLDER / "rules.yaml").read_text())
    assert pages
    assert all((ROOT / page).exists() for page in pages)


def test_every_alert_is_tried_and_stands_in_the_documentation():
    tried = (FOLDER / "rules_test.yaml").read_text()
    told = (ROOT / "docs" / "monitoring.md").read_text()
    for rule in ALERTS:
        assert re.search(rf"\b{rule['alert']}\b", tried), rule["alert"]
        assert f"| {rule['alert']} | {rule['labels']['severity']} |" in told, rule["alert"]


def test_jobs_are_those_of_the_rules():
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    jobs = {scrape["job_name"]: scrape for scrape in config["scrape_configs"]}
    asked = {
        job for rule in ALERTS for found in re.findall(r'job=~"([^"]+)"', rule["expr"]) for job in found.split("|")
    }
    assert asked == set(jobs)
    assert all((FOLDER / name).exists() for name in config["rule_files"])
    for scrape in jobs.values():
        for discovery in scrape.get("file_sd_configs", ()):
            assert all(yaml.safe_load((FOLDER / name).read_text()) == [] for name in discovery["files"])


@needs_promtool
def test_promtool_reads_configuration_and_rules():
    promtool("check", "config", FOLDER / "prometheus.yaml")


@needs_promtool
def test_alerts_fire_for_the_series_that_they_are_about_and_no_others():
    promtool("test", "rules", FOLDER / "rules_test.yaml")


@needs_promtool
def test_promtool_reads_every_query_of_the_dashboards(tmp_path):
    texts = [text for engine in ENGINES for _, text in queries(engine)]
    plain = [re.sub(r"\$__\w+", "5m", text) for text in texts]
    rules = [{"record": f"query:{i}:x", "expr": text} for i, text in enumerate(plain)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")
