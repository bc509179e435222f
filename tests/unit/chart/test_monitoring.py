"""What the chart brings for Prometheus and Grafana names metrics that launchers serve, of the release's jobs."""

from __future__ import annotations

import json
import re
from typing import Any

from flk_runtime.launcher.telemetry.metrics_page import METRICS
from tests.support.chart import JOB, ROOT, template


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\bflk_[a-z_]+", expression))


def rules(values: dict[str, Any]) -> list[dict[str, Any]]:
    (group,) = template({"prometheusRule": {"enabled": True}, **values}, "--namespace", "team").one("PrometheusRule")[
        "spec"
    ]["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_alerts_are_about_metrics_of_the_jobs_of_the_release() -> None:
    for rule in rules({}):
        assert metrics_in(rule["expr"]) <= METRICS.keys(), rule
        assert rule["expr"].count("{") == rule["expr"].count('{namespace="team"')
        assert "{{ $labels.job }} in namespace {{ $labels.namespace }}" in rule["annotations"]["summary"]
    assert all('{namespace="team", job="gpt"' in rule["expr"] for rule in rules({"job": JOB}))


def test_limits_of_alerts_are_values() -> None:
    of_site = {"enabled": True, "noProgressFor": "1h", "attemptsPerHour": 2, "goodputBelow": 0.9, "gpusIdleFor": "5m"}
    found = {rule["alert"]: rule for rule in rules({"prometheusRule": of_site})}
    assert found["FlkJobMakesNoProgress"]["for"] == "1h"
    assert found["FlkJobRestartsOften"]["expr"].endswith("[1h]) > 2")
    assert "flk_goodput_ratio" in found["FlkGoodputIsLow"]["expr"]
    assert "< 0.9" in found["FlkGoodputIsLow"]["expr"]
    assert "Less than 0.9 of its time" in found["FlkGoodputIsLow"]["annotations"]["description"]
    assert found["FlkGpusAreIdle"]["for"] == "5m"


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    chart = template({"dashboard": {"enabled": True, "annotations": {"grafana_folder": "flk"}}})
    (config,) = [each for each in chart.of_kind("ConfigMap") if each["metadata"]["name"] == "gpt-flk-dashboard"]
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config["metadata"]["annotations"] == {"grafana_folder": "flk"}
    board = json.loads(config["data"]["flk.json"])
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert set().union(*map(metrics_in, expressions)) <= METRICS.keys()
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}) == len(board["panels"])


def test_the_guide_explains_each_metric() -> None:
    assert set(re.findall(r"`(flk_[a-z_]+)`", (ROOT / "docs/guides/helm.md").read_text())) - {"flk_runtime"} == set(
        METRICS
    )
