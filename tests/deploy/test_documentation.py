"""docs/reference/metrics.md lists every metric with its kind and labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kvgraft.reuse.metrics import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
LISTED = {
    name: (kind, {*labels.split(",")} - {""})
    for name, labels, kind in re.findall(r"^\| `(kvgraft:\w+)\{?([\w,]*)\}?` \| (\w+) \|", PAGE, re.MULTILINE)
}


def test_metrics_of_reuse_are_listed_as_engines_make_them():
    made = {metric.full_name: (metric.kind.value, set(metric.labels)) for metric in METRICS}
    assert {name: LISTED.get(name) for name in made} == made


def test_metrics_of_the_server_are_listed_as_it_shows_them(embedded):
    shown = {
        name: (kind, set(labels) - {"model_name"})
        for name, (kind, labels) in embedded.families.items()
        if name.startswith("kvgraft:")
    }
    assert shown == LISTED
