"""The text of the metrics page: what telemetry and records become, with few lines for any size of job."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.contract.telemetry import GpuUsage, PodUsage, RankMeasurements, Sample, Telemetry
from flk_runtime.launcher import metrics_page
from flk_runtime.launcher.metrics_page import MetricsPage
from flk_runtime.launcher.settings import Settings

SETTINGS = Settings(("train.py",), job="gpt", node="n1")
JOB = Telemetry(
    9.0,
    2,
    100,
    [
        Sample(1.0, 1, 3, loss=9.0, mfu=0.9),
        Sample(2.0, 2, 4, loss=1.5, tokens_per_s=70.0, slowest_seconds=0.25, slowest_rank=6),
        Sample(3.0, 2, 5, step_seconds=0.5),
    ],
    [RankMeasurements(rank, rank // 8, 5, "step") for rank in range(256)],
)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> MetricsPage:
    def refuse(*arguments: object) -> None:
        raise OSError(1, "not served")

    monkeypatch.setattr(metrics_page, "_Server", refuse)
    return MetricsPage(SETTINGS, lambda line: None, lambda: JOB)


def values(page: MetricsPage) -> dict[str, float]:
    return {m[1]: float(m[2]) for m in re.finditer(r"^(flk_\S+) (\S+)$", page.text(), re.MULTILINE)}


def test_the_latest_value_of_the_running_attempt_is_shown(page: MetricsPage) -> None:
    found = values(page)
    assert found == {
        'flk_loss{job="gpt",pod="0",attempt="3"}': 1.5,
        'flk_tokens_per_second{job="gpt",pod="0",attempt="3"}': 70,
        'flk_median_step_seconds{job="gpt",pod="0",attempt="3"}': 0.5,
        'flk_slowest_work_seconds{job="gpt",pod="0",attempt="3",rank="6"}': 0.25,
    }


def test_the_usage_of_the_pod_and_of_its_gpus(page: MetricsPage) -> None:
    usage = PodUsage(0, "gpt-0", "n1", 1.0, 1.5, 2.0, 70, gpus=[GpuUsage(0.0, 1, 2), GpuUsage(0.5, 1, 2, watts=300.0)])
    page.put_progress([], None, usage)
    found = values(page)
    assert found['flk_pod_cpu_cores{job="gpt",pod="0",node="n1"}'] == 1.5
    assert found['flk_gpu_busy_ratio{job="gpt",pod="0",node="n1",gpu="0"}'] == 0
    assert found['flk_gpu_busy_ratio{job="gpt",pod="0",node="n1",gpu="1"}'] == 0.5
    assert [name for name in found if "watts" in name] == ['flk_gpu_power_watts{job="gpt",pod="0",node="n1",gpu="1"}']
    assert not any(name.startswith("flk_pod_memory_limit") for name in found)


def test_failures_are_counted_by_kind_also_when_the_record_has_dropped_them(page: MetricsPage) -> None:
    attempts = [Attempt(n, 1.0, 2.0, Failure(kind, 0)) for n, kind in enumerate([Kind.OOM, Kind.LOST, Kind.OOM])]
    page.put_record(JobRecord("running", 0, attempts=attempts[:2]))
    page.put_record(replace(JobRecord("running", 0), attempts=attempts[1:]))
    found = {name: value for name, value in values(page).items() if name.startswith("flk_failures")}
    assert found == {
        'flk_failures_total{job="gpt",pod="0",kind="lost"}': 1,
        'flk_failures_total{job="gpt",pod="0",kind="oom"}': 2,
    }


def test_every_metric_has_its_help_and_type_once(page: MetricsPage) -> None:
    page.put_progress([], None, PodUsage(0, "", "", 1.0, gpus=[GpuUsage(0.1, 1, 2)] * 8))
    text = page.text()
    names = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    for name in names:
        assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} ") == 1
