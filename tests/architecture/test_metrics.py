"""Documents, dashboard and rules name metrics that there are, with labels that they have."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from octavo.metrics import Kind, Metric
from octavo_gateway import metrics as gateway

from executor_svc import metrics as executor
from scheduler_svc.observation import definitions as scheduler

METRICS = {m.name: m for m in (*scheduler.METRICS, *executor.METRICS, *gateway.METRICS)}
NAME = re.compile(r"\boctavo_(?:scheduler|executor|gateway)_[a-z0-9_]+\b")
SELECTOR = re.compile(r"\b(octavo_\w+)\{([^}]*)\}")
MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")
RECORD = re.compile(r"\boctavo:[a-z0-9_:]+\b")
GROUPING = re.compile(r"\b(?:by|ignoring|on|without)\s*\(([^)]*)\)")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
# Labels that Prometheus itself brings.
BROUGHT = {"job", "instance", "le"}


def metric_of(series: str) -> Metric | None:
    """The metric that a series belongs to; None if there is none."""
    if series in METRICS:
        metric = METRICS[series]
        return None if metric.kind is Kind.HISTOGRAM else metric
    metric = METRICS.get(re.sub(r"_(bucket|count|sum)$", "", series))
    return metric if metric is not None and metric.kind is Kind.HISTOGRAM else None


@pytest.fixture(scope="module")
def dashboard(root: Path) -> dict[str, Any]:
    return json.loads((root / "deploy" / "grafana" / "octavo.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def rules(root: Path) -> list[dict[str, Any]]:
    text = (root / "deploy" / "prometheus" / "rules.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def queries(dashboard: dict[str, Any], rules: list[dict[str, Any]]) -> list[str]:
    """Every expression of the dashboard and of the rules."""
    shown = [target["expr"] for panel in panels(dashboard) for target in panel["targets"]]
    variables = dashboard["templating"]["list"]
    asked = [v["definition"] for v in variables if v["type"] == "query"]
    return [*shown, *asked, *(rule["expr"] for rule in rules)]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Panels that show something."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_names_are_of_one_metric() -> None:
    """No two services define the same one."""
    total = len(scheduler.METRICS) + len(executor.METRICS) + len(gateway.METRICS)
    assert len(METRICS) == total


def test_the_page_is_what_the_definitions_generate(root: Path, tmp_path: Path) -> None:
    """Byte for byte: run `make reference` after a change of a metric."""
    fresh = tmp_path / "metrics.md"
    script = root / "scripts" / "generate_metrics_doc.py"
    subprocess.run([sys.executable, "-P", script, fresh], check=True)
    committed = (root / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert fresh.read_text(encoding="utf-8") == committed
    assert all(f"| `{name}` |" in committed for name in METRICS)


def test_dashboard_and_rules_ask_for_metrics_that_there_are(queries: list[str]) -> None:
    """A metric that was renamed takes its panels and alerts with it."""
    named = {name for query in queries for name in NAME.findall(query)}
    assert len(named) > 40
    assert {name for name in named if metric_of(name) is None} == set()


def test_dashboard_and_rules_select_by_labels_that_there_are(queries: list[str]) -> None:
    """A matcher on a label that a metric has not selects nothing, silently."""
    wrong = [
        (series, label)
        for query in queries
        for series, matchers in SELECTOR.findall(query)
        for label in MATCHER.findall(matchers)
        if label not in BROUGHT | set(metric_of(series).labels)
    ]
    assert wrong == []


def test_what_is_grouped_by_is_a_label(queries: list[str]) -> None:
    """Of one of the query's metrics, or of a record's, which are by job and executor."""
    for query in queries:
        labels = {label for name in NAME.findall(query) for label in metric_of(name).labels}
        grouped = {
            label.strip()
            for labels_text in GROUPING.findall(query)
            for label in labels_text.split(",")
            if label.strip()
        }
        assert grouped <= labels | BROUGHT, query


def test_records_that_are_used_are_recorded(
    queries: list[str], rules: list[dict[str, Any]]
) -> None:
    """And named after what they are."""
    recorded = {rule["record"] for rule in rules if "record" in rule}
    assert {name for query in queries for name in RECORD.findall(query)} <= recorded


def test_every_alert_is_explained_and_tested(root: Path, rules: list[dict[str, Any]]) -> None:
    """A runbook says what to do, a unit test shows when it fires."""
    alerts = [rule for rule in rules if "alert" in rule]
    assert alerts
    page = (root / "docs" / "alerts.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", page, re.MULTILINE))
    tests = yaml.safe_load(
        (root / "deploy" / "prometheus" / "rules_test.yml").read_text(encoding="utf-8")
    )["tests"]
    checks = [check for test in tests for check in test.get("alert_rule_test", ())]
    fired = {check["alertname"] for check in checks if check["exp_alerts"]}
    names = {alert["alert"] for alert in alerts}
    assert names == headings == fired
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"]["runbook"] == f"docs/alerts.md#{alert['alert'].lower()}"
        assert {"summary", "description"} <= set(alert["annotations"])


def test_documents_name_metrics_that_there_are(root: Path, rules: list[dict[str, Any]]) -> None:
    """A reader can look for what a page names."""
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for page in (root / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        known = set(METRICS) | {metric.base_name for metric in METRICS.values()}
        unknown = {name for name in NAME.findall(text) if not metric_of(name) and name not in known}
        assert unknown == set(), page.name
        assert set(RECORD.findall(text)) <= recorded, page.name


def test_panels_do_not_overlap_and_say_what_they_show(dashboard: dict[str, Any]) -> None:
    """Grafana would move the one beneath; a title alone explains nothing."""
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        columns = range(place["x"], place["x"] + place["w"])
        lines = range(place["y"], place["y"] + place["h"])
        cells = set(itertools.product(columns, lines))
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in panels(dashboard):
        assert panel["description"] and panel["targets"], panel["title"]


def test_variables_that_queries_use_are_defined(dashboard: dict[str, Any]) -> None:
    """Prometheus is one of them, so that the dashboard fits any Grafana."""
    defined = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "executor"} <= defined
    used = set(_used_variables(dashboard))
    assert used == defined


def _used_variables(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in panels(dashboard):
        yield from VARIABLE.findall(panel["datasource"]["uid"])
        for target in panel["targets"]:
            names = VARIABLE.findall(target["expr"])
            yield from (name for name in names if not name.startswith("__"))
