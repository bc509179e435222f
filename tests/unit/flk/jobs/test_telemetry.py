"""Where the client finds the telemetry of a job: its launcher, the archived record, the log."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from flk.errors import JobNotFoundError
from flk.jobs.telemetry import read_telemetry
from flk.kube import Object
from flk.kube.sockets import Executed
from flk.observe.client import JobClient
from flk.observe.progress import read_telemetry_of
from flk_runtime.contract.log_format import TELEMETRY_MARKER
from flk_runtime.contract.telemetry import Sample, Telemetry, pack_telemetry
from tests.support.api_server import FakeApiServer
from tests.support.jobs import JobBuilder

pytestmark = pytest.mark.usefixtures("kubeconfig")
NOW = 1795608000.0
KEPT = Telemetry(5.0, 1, 90, [Sample(4.0, 1, 7, loss=0.5)], settings={"strategy": "ddp"})


def with_launcher(fake: FakeApiServer) -> None:
    builder = JobBuilder(1)
    builder.container["command"] = ["python3", "-u", "-m", "flk_runtime", "--", "train.py"]
    builder.container["image"] = "registry/gpt:1"
    builder.all("pod").add_to(fake)


def answers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Have the launcher answer with the telemetry. Returns the commands that it gets."""
    commands: list[list[str]] = []

    def execute(client: JobClient, pod: Object, command: list[str], timeout: float) -> Executed:
        commands.append(command)
        return Executed(0, json.dumps(asdict(KEPT)).encode(), b"")

    monkeypatch.setattr(JobClient, "execute", execute)
    return commands


def test_the_launcher_of_a_running_job_answers(fake: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with_launcher(fake)
    commands = answers(monkeypatch)
    found = read_telemetry(JobClient.connect(), "gpt")
    assert found.history == KEPT.history
    assert found.settings == {"strategy": "ddp", "image": "registry/gpt:1"}
    assert commands == [["python3", "-u", "-m", "flk_runtime", "metrics"]]


def test_the_log_of_a_job_that_has_ended_tells_what_its_launcher_has_measured(fake: FakeApiServer) -> None:
    JobBuilder(1).condition("Succeeded").ended(0, 0).add_to(fake)
    packed = pack_telemetry(KEPT)
    lines = [
        "[rank 0] {}",
        f"[rank 0] [pod 0] {TELEMETRY_MARKER}{packed}",
        f"[pod 0] {TELEMETRY_MARKER}{packed}",
        "[pod 0] bye",
    ]
    fake.written["gpt-worker-0"] = "\n".join(lines)
    assert read_telemetry(JobClient.connect(), "gpt").history == KEPT.history
    fake.written["gpt-worker-0"] = "\n".join(lines[:2])
    assert read_telemetry(JobClient.connect(), "gpt").history == []


def test_a_job_that_nobody_knows(fake: FakeApiServer) -> None:
    with pytest.raises(JobNotFoundError):
        read_telemetry(JobClient.connect(), "gpt")


def test_lines_of_metrics_become_samples() -> None:
    lines = [
        '2026-11-25T12:00:00Z [rank 0] {"step": 1, "loss": 3.0, "total": 40}',
        '2026-11-25T12:00:01Z [rank 1] {"step": 9, "loss": 1.0}',
        '2026-11-25T12:00:02Z [rank 0] {"step": 2, "loss": 2.0}',
        '2026-11-25T12:00:03Z [rank 0] {"step": 3, "loss": 1.0}',
        '2026-11-25T12:00:04Z [rank 0] {"step": 2, "loss": 2.5, "tokens_per_s": 10}',
    ]
    found = read_telemetry_of(lines, NOW)
    assert (found.time, found.total_steps, found.diverged) == (NOW, 40, None)
    assert [(each.step, each.loss, each.tokens_per_s) for each in found.history] == [(1, 3.0, None), (2, 2.5, 10.0)]


def test_a_loss_that_is_no_number_is_told_and_is_in_no_sample() -> None:
    def found(*losses: str) -> tuple[int | None, list[float | None]]:
        lines = [
            f'2026-11-25T12:00:0{step}Z [rank 0] {{"step": {step}, "loss": {loss}}}' for step, loss in enumerate(losses)
        ]
        telemetry = read_telemetry_of(lines, NOW)
        return telemetry.diverged, [each.loss for each in telemetry.history]

    assert found("1.0", "NaN", "Infinity") == (1, [1.0, None, None])
    assert found("1.0", "NaN", "2.0") == (None, [1.0, None, 2.0])
