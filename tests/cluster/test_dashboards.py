"""The dashboard and the alerts: Grafana's model, names that runs publish, and answers of a real Prometheus that scrapes
a real Ray. Grafana is in no package index: how it draws the panels is untested."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from rayrft.monitor.ray_metrics import RayMetrics
from tests.cluster.prometheus import (
    DASHBOARD,
    GRAFANA,
    PANELS,
    PROMETHEUS,
    QUERIES,
    needs_prometheus,
    prometheus,
    until_complete,
)
from tests.core.given import run_folder
from tests.monitor.made import documented, every_record

SCRIPT = runpy.run_path(str(GRAFANA / "dashboard.py"))
ALERTS = [
    rule for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"] for rule in group["rules"]
]


def _exactly(*optional: str, **fields: Any) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "properties": fields, "required": required, "additionalProperties": False}


def _with(*fields: str) -> dict[str, Any]:
    """The schema of an object with at least these fields."""
    return {"type": "object", "required": [*fields]}


def _integer(least: int, most: int = 1 << 31) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def _some(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT, _NAME = {"type": "string"}, {"type": "string", "minLength": 1}
_SOURCE = _exactly(type={"const": "prometheus"}, uid={"const": "${datasource}"})
_PLACE = _exactly(x=_integer(0, 23), y=_integer(0), w=_integer(1, 24), h=_integer(1))
_TARGET = _exactly(refId={"type": "string", "pattern": "^[A-Z]$"}, datasource=_SOURCE, expr=_NAME, legendFormat=_NAME)
_CUSTOM = _exactly(
    *("showPoints", "fillOpacity", "stacking"),
    showPoints={"enum": ["auto", "never", "always"]},
    fillOpacity=_integer(0, 100),
    stacking=_exactly(mode={"enum": ["none", "normal", "percent"]}, group=_TEXT),
)
_CURVES = _exactly(
    "description",
    id=_integer(1),
    type={"const": "timeseries"},
    title=_NAME,
    description=_TEXT,
    datasource=_SOURCE,
    gridPos=_PLACE,
    fieldConfig=_exactly(
        defaults=_exactly("custom", unit={"enum": ["none", "percentunit", "s"]}, custom=_CUSTOM),
        overrides={"type": "array", "maxItems": 0},
    ),
    options=_with("legend", "tooltip"),
    targets=_some(_TARGET),
)
_ROW = _exactly(
    id=_integer(1),
    type={"const": "row"},
    title=_NAME,
    collapsed={"type": "boolean"},
    gridPos=_PLACE,
    panels={"type": "array", "items": _CURVES},
)
_VARIABLE = _with("name", "type", "query") | {"properties": {"name": _TEXT, "type": {"enum": ["datasource", "query"]}}}
SCHEMA = _exactly(
    *("tags", "editable", "graphTooltip", "refresh", "annotations"),
    uid={"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
    title=_NAME,
    schemaVersion=_integer(36),
    tags={"type": "array", "items": _TEXT},
    editable={"type": "boolean"},
    graphTooltip={"enum": [0, 1, 2]},
    refresh=_TEXT,
    time=_with("from", "to"),
    annotations=_with("list"),
    templating=_with("list") | {"properties": {"list": {"type": "array", "items": _VARIABLE}}},
    panels=_some({"anyOf": [_CURVES, _ROW]}),
)
"""Of Grafana's dashboard model (https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model),
what this dashboard uses: a key that it does not know is an error here, whereas Grafana would ignore it."""


def overlapping(panels: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The titles of panels that lie on each other."""

    def apart(one: dict[str, int], other: dict[str, int]) -> bool:
        return any(
            one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at]
            for at, size in (("x", "w"), ("y", "h"))
        )

    pairs = combinations(panels, 2)
    return [(one["title"], other["title"]) for one, other in pairs if not apart(one["gridPos"], other["gridPos"])]


def all_panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for panel in dashboard["panels"] for inner in (panel, *panel.get("panels", ()))]


def test_the_dashboard_is_that_of_the_script_in_the_model_of_grafana() -> None:
    assert SCRIPT["dashboard"]() == DASHBOARD, "stale: run `python cluster/grafana/dashboard.py`"
    jsonschema.validate(DASHBOARD, SCHEMA)
    assert overlapping(DASHBOARD["panels"]) == []
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in DASHBOARD["panels"])
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in PANELS:
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters), panel["title"]
    assert all('run=~"$run"' in query for query in QUERIES.values())
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD))) - {"__all"} <= variables


def test_panels_and_alerts_name_only_metrics_that_runs_publish() -> None:
    text = json.dumps(DASHBOARD) + json.dumps(ALERTS)
    found = set(re.findall(r"\bray_(rayrft_\w+)", text))
    assert len(found) > 40 and found <= documented(), found - documented()
    assert set(re.findall(r'"(rayrft_\w+)\\"', text)) <= documented()


def test_rays_own_dashboards_get_the_panels_once_and_keep_theirs(tmp_path: Path) -> None:
    from ray.dashboard.modules.metrics.grafana_dashboard_factory import generate_default_grafana_dashboard

    text, _ = generate_default_grafana_dashboard()
    core, own = tmp_path / "default_grafana_dashboard.json", json.loads(text)
    missing = subprocess.run([sys.executable, GRAFANA / "dashboard.py", tmp_path], capture_output=True, text=True)
    assert missing.returncode == 1 and "start Ray with its dashboard" in missing.stderr
    core.write_text(text)
    for _ in range(2):
        subprocess.run([sys.executable, GRAFANA / "dashboard.py", tmp_path], check=True)
    assert json.loads((tmp_path / "rayrft.json").read_text()) == DASHBOARD
    changed = json.loads(core.read_text())
    row, *rest = changed["panels"]
    jsonschema.validate(row, _ROW)
    assert [panel["title"] for panel in row["panels"]] == [panel["title"] for panel in PANELS]
    assert overlapping(changed["panels"]) == [] and row["gridPos"]["y"] == 0
    ids = [panel["id"] for panel in all_panels(changed)]
    assert len(set(ids)) == len(ids)
    for panel in all_panels({"panels": rest}):
        panel["gridPos"]["y"] -= 1
    variables = changed["templating"]["list"]
    assert [each["name"] for each in variables].count("run") == 1
    theirs = {**changed, "panels": rest, "templating": {"list": variables[:-1]}}
    assert theirs == own


@needs_prometheus
def test_alerts_fire_and_are_silent_as_promtool_plays_them() -> None:
    for arguments in (["check", "config", PROMETHEUS / "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = set(re.findall("alertname: (Rayrft\\w+)\n", (Path(__file__).parent / "alerts_test.yml").read_text()))
    assert tested == {rule["alert"] for rule in ALERTS}  # each with an alert that fires


@needs_prometheus
def test_every_query_of_every_panel_has_data_of_what_ray_exports(ray_cluster: Any, tmp_path: Path) -> None:
    sink = RayMetrics(run_folder(tmp_path, "published"))
    with prometheus(ray_cluster, tmp_path) as source:
        try:
            for record in every_record():
                sink.write(record)
            assert until_complete(source, "published", 90) == []
            assert set(source.alerts().values()) == {"ok"} and len(source.alerts()) == len(ALERTS)
            exported = {
                each["metric"]["__name__"] for each in source.series('{__name__=~"ray_rayrft_.+",run="published"}')
            }
            assert {f"ray_{name}" for name in documented()} == exported
            [steps] = source.series('ray_rayrft_train_steps_total{run="published"}')
            assert float(steps["value"][1]) == sum(record.kind == "step" for record in every_record())
        finally:
            sink.close(failed=False)
