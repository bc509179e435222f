"""`flk top` where it prints once, and its options; where the telemetry comes from."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from flk.cli.top import measure, top, window
from flk.cli.top_text import Line
from flk.errors import JobNotFoundError
from flk.kube import Object
from flk.kube.sockets import Executed
from flk.observe.client import JobClient
from flk_runtime.contract.status import Phase, RankStatus
from flk_runtime.contract.telemetry import Sample, Telemetry
from tests.support.api_server import FakeApiServer
from tests.support.jobs import NOW, JobBuilder

pytestmark = pytest.mark.usefixtures("kubeconfig")
MEASURED = Telemetry(
    NOW,
    0,
    100,
    [Sample(NOW, 0, 40, loss=2.5, samples_per_s=64.0, step_seconds=0.5)],
    [RankStatus(0, 0, 40, Phase.TRAINING)],
)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were executed in pods."""
    found: list[list[str]] = []

    def execute(client: JobClient, pod: Object, command: list[str], timeout: float) -> Executed:
        found.append(command)
        return Executed(0, json.dumps(asdict(MEASURED)).encode(), b"")

    monkeypatch.setattr(JobClient, "execute", execute)
    return found


def launched(name: str = "gpt") -> JobBuilder:
    builder = JobBuilder(2, name=name)
    builder.container["command"] = ["python3", "-m", "flk_runtime", "--", "train.py"]
    return builder.all("pod")


def test_elsewhere_than_on_a_terminal_the_view_is_printed_once(
    fake: FakeApiServer, commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    launched().add_to(fake)
    assert top("gpt") is None
    out = capsys.readouterr().out
    assert "step 40 of 100   0.5 s/step   64 samples/s   loss 2.5   30s left" in out
    assert "\x1b" not in out


def test_jobs_without_telemetry(fake: FakeApiServer, commands: list[list[str]]) -> None:
    JobBuilder(1).all("pod").add_to(fake)
    assert "container is waiting to start" in measure(JobClient.connect(), "gpt")[1]  # the log could not be read
    fake.written["gpt-worker-0"] = "[rank 0] hello"
    found, why = measure(JobClient.connect(), "gpt")
    assert found.ranks == []
    assert why.startswith("the launchers have told none yet")
    assert commands == []


def test_which_job(fake: FakeApiServer) -> None:
    with pytest.raises(JobNotFoundError):
        top("bert")


def test_a_window_is_bounded_and_its_last_line_has_the_keys() -> None:
    lines = [Line(str(number)) for number in range(20)]
    shown, scroll = window(lines, 6, 99)
    assert ([line.text for line in shown[:-1]], scroll) == (["15", "16", "17", "18", "19"], 15)
    assert shown[-1].text == "q quit   j/k scroll"
    assert window(lines, 6, -3)[0][-1].text.endswith("and 15 more lines")
    assert window(lines, 1, 0)[0] == lines[:1]
    assert window([], 6, 5)[1] == 0
