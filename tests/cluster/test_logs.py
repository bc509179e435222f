"""Logs of jobs in a real cluster: of both attempts, of the rank that failed first, and when pods and job are gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH

FAILS = """
import os, time
print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
time.sleep(3)  # in which both ranks begin
if os.environ["RANK"] == "1":
    raise ValueError("sample 371 has no label")
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "fails.py").write_text(FAILS)
    return tmp_path


@pytest.mark.soak
def test_logs_of_a_job_that_fails_and_then_is_gone(flk: Any, kubectl: Any, image: str, folder: Path) -> None:
    args = ["--replicas", "2", "--cpu", "50m", "--restarts", "1", "--image", image, "--env", "FLK_RETRY_SAME_FAILURE=1"]
    args += WITHOUT_TORCH
    made = flk("submit", "fails.py", "--name", "fails", *args, cwd=folder)
    assert made.code == 0, made.stderr
    followed = flk("logs", "fails", "-o", "json")
    assert followed.code == 100, followed.stderr
    assert "rank 1 in fails-worker-1 raised ValueError: sample 371 has no label" in followed.stderr
    lines = [json.loads(line) for line in followed.stdout.splitlines()]
    begun = {
        (line["rank"], line["attempt"], line["message"]) for line in lines if line["message"].startswith("attempt ")
    }
    assert {(rank, n + 1, f"attempt {n}") for rank in (0, 1) for n in (0, 1)} <= begun
    assert all(line["time"] and line["pod"].startswith("fails-worker-") for line in lines)

    chosen = flk("logs", "fails", "--no-follow", "--rank", "1")
    begins = [line for line in chosen.stdout.splitlines() if "] attempt" in line]
    assert begins == ["[rank 1] attempt 0", "[pod 1] attempt 2", "[rank 1] attempt 1"]

    kubectl("delete", "pod", "fails-worker-1", "--wait=true")
    kept = flk("logs", "fails", "--no-follow", "--rank", "1")
    assert kept.code == 0
    assert "fails-worker-1 is gone; these are its last lines, as of " in kept.stderr
    assert "[rank 1] ValueError: sample 371 has no label" in kept.stdout.splitlines()

    assert flk("delete", "--finished").stdout == "fails\n"
    gone = flk("logs", "fails")
    assert gone.code == 100  # that of the job, which had ended
    assert "[rank 1] ValueError: sample 371 has no label" in gone.stdout.splitlines()
    assert "job fails is gone" in gone.stderr
