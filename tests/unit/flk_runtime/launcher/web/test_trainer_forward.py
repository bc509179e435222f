"""The progress of a job goes to the status server that Kubeflow Trainer names."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flk_runtime.contract import pod_env
from flk_runtime.launcher.web import trainer_forward as module
from flk_runtime.launcher.web.trainer_forward import TrainerForward, status_of
from tests.support.processes import until
from tests.support.status_server import StatusServer


def told(line: dict[str, Any], first: int = 0, seconds: float = 10.0) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(status_of(json.dumps(line).encode(), first, 0.0, seconds))["trainerStatus"]
    assert status.pop("lastUpdatedTime").endswith("+00:00")
    return status


def test_percent_and_remaining_time_come_from_the_steps() -> None:
    metrics = [{"name": name, "value": value} for name, value in (("step", "20"), ("total", "50"), ("loss", "0.5"))]
    assert told({"step": 20, "total": 50, "loss": 0.5}, first=10) == {
        "progressPercentage": 40,
        "estimatedRemainingSeconds": 30,
        "metrics": metrics,
    }


def test_what_a_client_has_told_itself_is_kept() -> None:
    status = told({"step": 4, "total_steps": 10, "progress": 39.9, "eta_s": 90})
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (39, 90)
    assert [each["name"] for each in status["metrics"]] == ["step", "total_steps"]


def test_what_is_not_known_is_left_out() -> None:
    assert told({"step": 4, "name": "x", "ok": True, "loss": float("nan")}) == {
        "metrics": [{"name": "step", "value": "4"}]
    }
    assert "estimatedRemainingSeconds" not in told({"step": 4, "total": 8}, first=4)


def test_a_status_keeps_the_limits_of_the_protocol() -> None:
    status = told({"step": 9, "total": 3, "eta_s": 1e12} | {f"{n}{'x' * 80}": n for n in range(300)})
    assert (status["progressPercentage"], status["estimatedRemainingSeconds"]) == (100, 2**31 - 1)
    assert len(status["metrics"]) == 256
    assert max(len(each["name"]) for each in status["metrics"]) == 64


@pytest.fixture
def server() -> Iterator[StatusServer]:
    with StatusServer() as made:
        yield made


@pytest.fixture
def variables(server: StatusServer, tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text("first\n")
    return {
        pod_env.TRAINER_URL: server.url,
        pod_env.TRAINER_TOKEN: str(token),
    }


def test_the_newest_line_is_sent_with_the_token_of_now(server: StatusServer, variables: dict[str, str]) -> None:
    forward = TrainerForward(variables, pytest.fail)
    forward.put(b'{"step": 1, "total": 100}')
    until(lambda: server.got, "the first line is sent", seconds=20)
    Path(variables[pod_env.TRAINER_TOKEN]).write_text("second")
    for step in range(2, 40):
        forward.put(b'{"step": %d, "total": 100}' % step)
    forward.put(b'{"no": "metrics"}')
    forward.close()
    assert [(token, status["progressPercentage"]) for token, status in server.got] == [
        ("Bearer first", 1),
        ("Bearer second", 39),
    ]


def test_a_server_that_refuses_is_one_line_of_the_log(
    server: StatusServer, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY", 0.01)
    server.code = 403
    lines: list[str] = []
    forward = TrainerForward(variables, lines.append)
    for step in (1, 2):
        forward.put(b'{"step": %d}' % step)
        until(lambda step=step: len(server.got) == step, "the line is sent", seconds=20)
    forward.close()
    (line,) = lines
    assert line.startswith("the progress is not in the TrainJob: http://127.0.0.1:")
    assert line.endswith("does not take it: HTTP Error 403: Forbidden")


def test_a_server_that_does_not_speak_http_ends_nothing(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_EVERY", 0.01)
    heard: list[bytes] = []
    lines: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for _ in range(2):
                with listener.accept()[0] as connection:
                    heard.append(connection.recv(1 << 16))
                    connection.sendall(b"no HTTP\r\n")

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        forward = TrainerForward({**variables, pod_env.TRAINER_URL: url}, lines.append)
        for step in (1, 2):
            forward.put(b'{"step": %d}' % step)
            until(lambda step=step: len(heard) == step, "the line is sent", seconds=20)
        forward.close()
    assert lines == [f"the progress is not in the TrainJob: {url} does not take it: no HTTP\r\n"]
