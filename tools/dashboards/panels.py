"""What a dashboard consists of, and Grafana's JSON of it. Knows no metric and no engine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24
"""Columns of Grafana's grid."""
_STAT_HEIGHT, _GRAPH_HEIGHT = 4, 8
_SCHEMA_VERSION = 39
_COLOURS = {"ok": "green", "notice": "yellow", "bad": "red"}
_NO_TRAFFIC = {"type": "special", "options": {"match": "null+nan", "result": {"index": 0, "text": "No traffic"}}}
_METRIC = re.compile(r"\b(?:kvgraft|vllm|sglang):\w+|\bup\b")


@dataclass(frozen=True)
class Target:
    """A query.

    Attributes:
        expr: PromQL; `@` within braces stands for the labels that the variables of the dashboard choose.
        legend: Name of its lines.
    """

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """A graph, or a single value.

    Attributes:
        title: Above it.
        text: What it shows and how to read it; the names of its metrics are added.
        targets: Queries.
        unit: Grafana's name of the unit.
        kind: `timeseries` or `stat`.
        width: Columns.
        stack: "" for lines, `normal` for areas on one another, `percent` for shares of the whole.
        limits: Values from which a stat is `notice` or `bad`.
        words: Words for values of a stat.
        top: Highest value of the axis, None for what comes.
        nothing: Said where queries find nothing.
    """

    title: str
    text: str
    targets: tuple[Target, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    stack: str = ""
    limits: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    top: float | None = None
    nothing: str = "No traffic"

    @property
    def metrics(self) -> list[str]:
        """Metrics of its queries, without the suffixes of histograms' series."""
        found = [name for target in self.targets for name in _METRIC.findall(target.expr)]
        return sorted({re.sub(r"_(bucket|sum|count)$", "", name) for name in found})


@dataclass(frozen=True)
class Row:
    """Panels below a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the head of the dashboard, read from the values of a label.

    Attributes:
        name: Of label and variable.
        query: `label_values(...)`.
    """

    name: str
    query: str


@dataclass(frozen=True)
class Dashboard:
    """A whole one.

    Attributes:
        uid: Its address in Grafana.
        title: Its name there.
        text: What it is for.
        selector: What `@` stands for.
        variables: In the order of their dependence.
        rows: From above.
    """

    uid: str
    title: str
    text: str
    selector: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    def as_json(self) -> dict[str, object]:
        """Return what Grafana imports."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.text,
            "tags": ["kvgraft"],
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "schemaVersion": _SCHEMA_VERSION,
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "templating": {"list": [_source_variable(), *(_variable(variable) for variable in self.variables)]},
            "panels": self._panels(),
        }

    def _panels(self) -> list[dict[str, object]]:
        placed: list[dict[str, object]] = []
        top = 0
        for row in self.rows:
            left, height = 0, 0
            heading = {"type": "row", "title": row.title, "collapsed": False, "panels": []}
            placed.append({"id": len(placed) + 1, **heading, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}})
            top += 1
            for panel in row.panels:
                if left + panel.width > WIDTH:
                    left, top, height = 0, top + height, 0
                own = _STAT_HEIGHT if panel.kind == "stat" else _GRAPH_HEIGHT
                place = {"x": left, "y": top, "w": panel.width, "h": own}
                placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(panel, self.selector)})
                left, height = left + panel.width, max(height, own)
            top += height
        return placed


def _source_variable() -> dict[str, object]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}


def _variable(variable: Variable) -> dict[str, object]:
    return {
        "name": variable.name,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": variable.query, "refId": variable.name},
        "definition": variable.query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(panel: Panel, selector: str) -> dict[str, object]:
    names = ", ".join(f"`{name}`" for name in panel.metrics)
    is_stat = panel.kind == "stat"
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": f"{panel.text} Metrics: {names}.",
        "datasource": SOURCE,
        "targets": [_target(target, place, selector, is_stat) for place, target in enumerate(panel.targets)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _stat_options() if is_stat else _graph_options(),
    }


def _target(target: Target, place: int, selector: str, is_stat: bool) -> dict[str, object]:
    expr = target.expr.replace("@", selector)
    return {
        "refId": chr(ord("A") + place),
        "datasource": SOURCE,
        "expr": expr,
        "legendFormat": target.legend or "__auto",
        "instant": is_stat,
        "range": not is_stat,
    }


def _defaults(panel: Panel) -> dict[str, object]:
    words = {
        "type": "value",
        "options": {k: {"index": i + 1, "text": v} for i, (k, v) in enumerate(panel.words.items())},
    }
    steps = [{"color": _COLOURS["ok"], "value": None}]
    steps += [{"color": _COLOURS[name], "value": value} for name, value in panel.limits.items()]
    defaults: dict[str, object] = {
        "unit": panel.unit,
        "min": 0,
        "noValue": panel.nothing,
        "mappings": [_NO_TRAFFIC, *([words] if panel.words else [])],
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.kind != "stat":
        stacking = {"mode": panel.stack or "none", "group": "A"}
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 40 if panel.stack else 5,
            "showPoints": "never",
            "stacking": stacking,
        }
    return defaults


def _stat_options() -> dict[str, object]:
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {"colorMode": "value", "graphMode": "none", "textMode": "auto", "reduceOptions": reduced}


def _graph_options() -> dict[str, object]:
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True}
    return {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
