"""A real Prometheus reads a launcher's page, and the chart's dashboard and alerts work with what it has read."""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flk_runtime.contract.log_format import Measured
from flk_runtime.contract.record import Attempt, Goodput, JobRecord
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import GpuUsage, PodUsage, Sample, Telemetry
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry.metrics_page import MetricsPage
from scripts.chart.dashboard import PANELS
from tests.support.chart import template
from tests.support.install import all_of, needed
from tests.support.ports import held_ports
from tests.support.processes import until

MEASURED = Measured(loss=1.5, samples_per_s=20.0, tokens_per_s=300.0, mfu=0.4, communication=0.1, data_wait=0.2)
TELEMETRY = Telemetry(9.0, 1, 100, [Sample(8.0, 1, 4, 0.5, 0.6, 3, **MEASURED.measured())])
USAGE = PodUsage(0, "gpt-worker-0", "n", 9.0, 1.0, 2.0, 3 << 20, 4 << 20, [GpuUsage(0.5, 1, 2)])


@pytest.fixture(scope="module")
def programs() -> list[str]:
    found: list[str] = needed(lambda: all_of("prometheus", "promtool"), "prometheus")
    return found


@pytest.fixture
def free_port() -> Iterator[Callable[[], int]]:
    with held_ports() as free_port:
        yield free_port


@pytest.fixture
def page(free_port: Callable[[], int], tmp_path: Path) -> int:
    """The port of a page of pod 0, which has all that a launcher can tell."""
    port = free_port()
    settings = Settings(("train.py",), job="gpt", namespace="team", pod_name="gpt-worker-0", metrics_port=port)
    made = MetricsPage(settings, pytest.fail, lambda: TELEMETRY)
    made.put_record(JobRecord("running", 0, attempts=[Attempt(0, 1.0, 2.0), Attempt(1, 3.0)]))
    made.put_progress(
        [RankStatus(0, 0, 4, step_seconds=0.5, saved=3, stored=2)],
        Goodput(9.0, {"computing": 3.0, "waiting": 1.0}, 0, 3),
        USAGE,
    )
    return port


@pytest.fixture
def ask(programs: list[str], page: int, free_port: Callable[[], int], tmp_path: Path) -> Iterator[Any]:
    """Asks a Prometheus that reads the page every second."""
    port = free_port()
    job = {"job_name": "monitor", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{page}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [programs[0], f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)

    def result(expression: str) -> list[Any]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=30) as answer:
            found: list[Any] = json.load(answer)["data"]["result"]
        return found

    def has_read() -> bool:
        try:
            return bool(result("flk_step"))
        except OSError:
            return False

    try:
        until(has_read, "Prometheus has read the page", seconds=60, context=(tmp_path / "log").read_text)
        yield result
    finally:
        process.kill()
        process.wait()


def test_each_query_of_the_dashboard_finds_something(ask: Any) -> None:
    for title, _, queries in PANELS:
        for expression, _ in queries:
            filled = expression.replace("$namespace", "team").replace("$job", "gpt")
            empty = "failures" in expression  # there was none
            assert bool(ask(filled)) is not empty, title
    (step,) = ask("flk_step")
    assert step["metric"].items() >= {"namespace": "team", "job": "gpt", "pod": "gpt-worker-0", "rank": "0"}.items()


def test_the_page_has_no_faults_that_promtool_finds(programs: list[str], page: int) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=30) as answer:
        done = subprocess.run([programs[1], "check", "metrics"], input=answer.read(), capture_output=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    own = {"namespace": "team", "job": "gpt", "pod": "gpt-worker-0", **labels}
    pairs = ",".join(f"{key}={json.dumps(value)}" for key, value in own.items())
    return {"series": f"{name}{{{pairs}}}", "values": values}


OTHER_KIND = series("flk_failures_total", "0 1x70", kind="oom")
# For each alert: what it is about, minute by minute, when it must be silent still and when it must fire.
ALERTS = {
    "FlkJobMakesNoProgress": ([series("flk_making_progress", "1x5 0x30")], 12, 17),
    "FlkJobHangs": ([series("flk_failures_total", "0x5 1x70", kind="hang"), OTHER_KIND], 4, 8),
    "FlkLossIsNoNumber": ([series("flk_loss", "1.5x5" + 10 * " NaN")], 5, 8),
    "FlkJobRestartsOften": ([series("flk_attempts_total", "1x30 1+1x10 11x20")], 29, 42),
    "FlkGoodputIsLow": (
        [series("flk_goodput_ratio", "0.5x120"), series("flk_time_seconds", "0+60x120", cause="computing")],
        60,
        90,
    ),
    "FlkRankIsSlow": ([series("flk_slow_ranks", "0x5 1x30")], 15, 22),
    "FlkGpusAreIdle": ([series("flk_pod_gpu_busy_ratio", "0.9x5 0.01x60")], 30, 40),
}


def test_each_alert_fires_when_it_should_and_not_before(programs: list[str], tmp_path: Path) -> None:
    rule = template({"prometheusRule": {"enabled": True}}, "--namespace", "team").one("PrometheusRule")
    assert {each["alert"] for each in rule["spec"]["groups"][0]["rules"]} == ALERTS.keys()
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rule["spec"]))
    severity = {each["alert"]: each["labels"]["severity"] for each in rule["spec"]["groups"][0]["rules"]}
    texts = {each["alert"]: each["annotations"] for each in rule["spec"]["groups"][0]["rules"]}
    tests = []
    for alert, (given, silent, fires) in ALERTS.items():
        kept = ("namespace", "job") if alert == "FlkGpusAreIdle" else ("namespace", "job", "pod")
        labels = {"namespace": "team", "job": "gpt", "pod": "gpt-worker-0"}
        named = {
            name: text.replace("{{ $labels.job }}", "gpt").replace("{{ $labels.namespace }}", "team")
            for name, text in texts[alert].items()
        }
        of_alert = {key: labels[key] for key in kept} | {"severity": severity[alert]}
        of_alert |= {"kind": "hang"} if alert == "FlkJobHangs" else {}
        fired = {"exp_labels": of_alert, "exp_annotations": named}
        times = [
            {"eval_time": f"{silent}m", "alertname": alert, "exp_alerts": []},
            {"eval_time": f"{fires}m", "alertname": alert, "exp_alerts": [fired]},
        ]
        tests.append({"interval": "1m", "input_series": given, "alert_rule_test": times})
    (tmp_path / "test.yml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests})
    )
    done = subprocess.run(
        [programs[1], "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
