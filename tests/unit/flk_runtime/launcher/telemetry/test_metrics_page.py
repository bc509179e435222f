"""The text of the metrics page: what telemetry and records become, with few lines for any size of job."""

from __future__ import annotations

import math
import queue
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.log_format import Measured
from flk_runtime.contract.record import Attempt, Goodput, JobRecord, Standstill
from flk_runtime.contract.status import Phase, RankStatus
from flk_runtime.contract.telemetry import GpuUsage, PodUsage, Sample, Telemetry
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import metrics_page
from flk_runtime.launcher.telemetry.metrics_page import METRICS, MetricsPage
from tests.support.ports import held_ports

SETTINGS = Settings(("train.py",), namespace="team", job="gpt", pod_name="gpt-worker-0", node="n1")
BASE = 'namespace="team",job="gpt",pod="gpt-worker-0"'
JOB = Telemetry(
    9.0,
    2,
    100,
    [
        Sample(1.0, 1, 3, loss=9.0, mfu=0.9),
        Sample(2.0, 2, 4, loss=1.5, tokens_per_s=70.0, slowest_seconds=0.25, slowest_rank=6),
        Sample(3.0, 2, 1_234_567, step_seconds=0.5),
    ],
    [RankStatus(rank, rank // 8, 5, Phase.TRAINING) for rank in range(256)],
)
USAGE = PodUsage(0, "gpt-worker-0", "n1", 1.0, 1.5, 2.0, 70, gpus=[GpuUsage(0.0, 1, 2), GpuUsage(0.5, 1, 2)])
RECORD = JobRecord("running", 0, attempts=[Attempt(0, 1.0)])
Make = Callable[..., MetricsPage]
GET = b"GET /metrics HTTP/1.0\r\n\r\n"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a page that is not served, with other settings where these are given."""

    def refuse(*arguments: object) -> None:
        raise OSError(1, "not served")

    monkeypatch.setattr(metrics_page, "PodServer", refuse)

    def page(telemetry: Telemetry | None = JOB, **settings: Any) -> MetricsPage:
        read = (lambda: telemetry) if telemetry else None
        return MetricsPage(replace(SETTINGS, **settings), lambda line: None, read)

    return page


def progress(step: int = -1, rank: int = 0) -> RankStatus:
    if step < 0:
        return RankStatus(rank, 0)
    return RankStatus(rank, 0, step, saved=step - 1, stored=step - 2)


def values(page: MetricsPage) -> dict[str, float]:
    """The samples of a page, without the labels that all have."""
    text = page.text().replace(f"{BASE},", "").replace(f"{{{BASE}}}", "")
    return {m[1]: float(m[2]) for m in re.finditer(r"^(flk_\S+) (\S+)$", text, re.MULTILINE)}


def test_the_latest_value_of_the_running_attempt_is_shown(make: Make) -> None:
    assert values(make()) == {
        "flk_making_progress": 0,
        "flk_total_steps": 100,
        'flk_loss{attempt="3"}': 1.5,
        'flk_tokens_per_second{attempt="3"}': 70,
        'flk_median_step_seconds{attempt="3"}': 0.5,
        'flk_slowest_work_seconds{attempt="3",rank="6"}': 0.25,
    }
    # Nothing is known of it yet.
    assert values(make(replace(JOB, attempt=3))) == {"flk_making_progress": 0, "flk_total_steps": 100}


def test_every_line_has_namespace_job_and_the_name_of_the_pod(make: Make) -> None:
    page = make()
    page.put_record(RECORD)
    page.put_progress([progress(3)], None, USAGE)
    lines = [line for line in page.text().splitlines() if not line.startswith("#")]
    assert all(line.partition("{")[2].startswith(BASE) for line in lines)
    unknown = make(namespace="", node="")
    unknown.put_progress([progress(3)])
    assert 'flk_step{job="gpt",pod="gpt-worker-0",rank="0"} 3' in unknown.text()


def test_the_use_of_the_gpus_of_the_pod(make: Make) -> None:
    page = make()
    page.put_progress([], None, USAGE)
    assert values(page)['flk_pod_gpu_busy_ratio{node="n1"}'] == 0.25


def test_ranks_have_their_numbers_and_exact_steps(make: Make) -> None:
    page = make(pod=1, processes=2, pods=2)
    page.put_progress([progress(1_234_567, 2), progress(rank=3)])
    found = values(page)
    assert found['flk_step{rank="2",node="n1"}'] == 1_234_567
    assert found['flk_saved_step{rank="2",node="n1"}'] == 1_234_566
    assert found['flk_stored_step{rank="2",node="n1"}'] == 1_234_565
    assert not any('rank="3"' in name for name in found)


def test_failures_are_counted_by_kind_also_when_the_record_has_dropped_them(make: Make) -> None:
    page = make()
    attempts = [Attempt(n, 1.0, 2.0, Failure(kind, 0)) for n, kind in enumerate([Kind.OOM, Kind.LOST, Kind.OOM])]
    page.put_record(JobRecord("running", 0, attempts=attempts[:2]))
    page.put_record(replace(JobRecord("running", 0), attempts=attempts[1:]))
    found = values(page)
    assert found["flk_attempts_total"] == 3
    counted = {name: value for name, value in found.items() if name.startswith("flk_failures")}
    assert {name for name, value in counted.items() if value} == {
        'flk_failures_total{kind="lost"}',
        'flk_failures_total{kind="oom"}',
    }
    assert counted['flk_failures_total{kind="oom"}'] == 2
    assert counted['flk_failures_total{kind="hang"}'] == 0  # else the first one would be no increase


def test_progress_is_made_while_an_attempt_runs_and_does_not_stand_still(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics_page.time, "monotonic", lambda: now[0])
    page = make()
    page.put_record(RECORD)

    def makes_progress() -> float:
        return values(page)["flk_making_progress"]

    assert makes_progress() == 0  # waits for its pods
    page.put_progress([progress()])
    assert makes_progress() == 1
    page.put_record(replace(RECORD, standstill=Standstill(1.0, "all wait for rank 3", "gpt-worker-1")))
    assert makes_progress() == 0
    page.put_record(RECORD)
    assert makes_progress() == 1
    now[0] += 61
    assert makes_progress() == 0
    assert "flk_making_progress" not in make(pod=1, pods=2).text()


def test_a_loss_that_is_no_number_is_not_the_last_one_that_was(make: Make) -> None:
    assert math.isnan(values(make(replace(JOB, diverged=3)))['flk_loss{attempt="3"}'])


def full(make: Make, **settings: Any) -> MetricsPage:
    """A page with all that a pod can have, of eight ranks and GPUs."""
    measured = dict.fromkeys(Measured().measured(), 0.5)
    sample = Sample(3.0, 2, 4, step_seconds=0.5, slowest_seconds=0.25, slowest_rank=6, **measured)
    page = make(replace(JOB, history=[sample]) if settings.get("pod", 0) == 0 else None, **settings)
    if settings.get("pod", 0) == 0:
        page.put_record(RECORD)
    goodput = Goodput(9.0, {"computing": 3.0}, 0, 3)
    page.put_progress([progress(3, rank) for rank in range(8)], goodput, USAGE)
    return page


def test_every_metric_is_shown_with_its_help_and_type_once(make: Make) -> None:
    text = full(make).text()
    assert {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")} == METRICS.keys()
    for name in METRICS:
        assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} ") == 1


def test_a_job_of_a_thousand_pods_has_few_lines(make: Make) -> None:
    def lines(**settings: Any) -> int:
        return sum(line.startswith("flk_") for line in full(make, processes=8, **settings).text().splitlines())

    assert lines(pod=1, pods=2) == 1 + 8 * 3
    assert lines(pod=1, pods=1000) == 1
    assert lines(pod=0, pods=1000) < 150


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Serves a page until the end of the test, and returns its port."""
    served: list[Any] = []
    server_of = metrics_page.PodServer

    def make(*arguments: Any) -> Any:
        served.append(server_of(*arguments))
        return served[0]

    monkeypatch.setattr(metrics_page, "PodServer", make)
    with held_ports() as hold:

        def start() -> int:
            port = hold()
            MetricsPage(replace(SETTINGS, metrics_port=port), pytest.fail)
            return port

        yield start
        served[0].shutdown()
        served[0].server_close()


def connect(port: int, request: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", port), timeout=20)
    client.sendall(request)
    return client


def test_a_client_that_resets_its_connection_is_no_traceback(
    serve: Callable[[], int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher's stderr is a file on the pod's disk."""
    failed: queue.SimpleQueue[str] = queue.SimpleQueue()

    def text(page: MetricsPage) -> str:
        failed.put("")
        raise ConnectionResetError

    monkeypatch.setattr(MetricsPage, "text", text)
    port = serve()
    for _ in range(3):
        with connect(port, GET) as client:
            failed.get(timeout=20)
            assert client.recv(1) == b"", "the thread has ended the connection"
    assert capfd.readouterr().err == ""


def test_a_job_may_have_any_name_where_there_is_no_kubernetes(make: Make) -> None:
    text = make(job='my "best"\\run\nof all').text()
    assert r'job="my \"best\"\\run\nof all"' in text
    assert len(text.splitlines()) == len(make().text().splitlines())
