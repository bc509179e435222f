"""What clients of Kubeflow Trainer post becomes lines of metrics."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from flk.observe.progress import read_progress
from flk_runtime.contract import pod_env
from flk_runtime.launcher.web.trainer_status import TrainerStatus, line_of


def body(**status: Any) -> bytes:
    return json.dumps({"trainerStatus": status}).encode()


def metric(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


STATUS = {
    "progressPercentage": 40,
    "estimatedRemainingSeconds": 90,
    "metrics": [metric("loss", "1.5"), metric("current_step", "4"), metric("total_steps", "10"), metric("lr", "nan")],
}


def test_a_status_becomes_a_line_that_status_reads() -> None:
    line = line_of(body(**STATUS), -1)
    assert json.loads(line) == {"step": 4, "total_steps": 10, "progress": 40, "eta_s": 90, "loss": 1.5}
    (found,) = read_progress([f"2026-01-01T00:00:00Z [rank 0] {line}"])
    assert (found.step, found.total, found.loss) == (4, 10, 1.5)


def test_the_step_of_the_rank_is_used_where_the_status_has_none() -> None:
    assert json.loads(line_of(body(progressPercentage=5), 7)) == {"step": 7, "progress": 5}
    assert json.loads(line_of(body(progressPercentage=5), -1)) == {"progress": 5}


@pytest.mark.parametrize("wrong", [b"", b"{}", b"[]", b'{"trainerStatus": {"metrics": [1]}}', b'{"trainerStatus": 1}'])
def test_what_is_no_status_is_no_line(wrong: bytes) -> None:
    assert line_of(wrong, 3) == ""


def test_only_the_ranks_of_the_job_may_post(tmp_path: Path) -> None:
    lines: list[bytes] = []
    variables = TrainerStatus(str(tmp_path), lines.append, lambda: 2).variables
    token = Path(variables[pod_env.TRAINER_TOKEN]).read_text()

    def post(content: bytes, given: str) -> int:
        request = urllib.request.Request(
            variables[pod_env.TRAINER_URL], data=content, headers={"Authorization": f"Bearer {given}"}, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    assert [post(body(**STATUS), token), post(body(**STATUS), "x"), post(b"{}", token)] == [200, 401, 400]
    assert [json.loads(line)["step"] for line in lines] == [4]
