"""The restart policy in a cluster: which failures are final, and what the training operator does with a pod."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH
from tests.support.terminations import terminations

SMALL = ["--cpu", "50m"]


def messages(kubectl: Any, job: str) -> list[dict[str, Any]]:
    """The termination messages of all pods of a job."""
    ends = terminations(kubectl, job)
    assert all(end["message"].startswith("{") for end in ends), ends
    return [json.loads(end["message"]) for end in ends]


@pytest.mark.promise("Recovery: Failures use a budget, and the same one twice without progress is final")
def test_the_same_failure_twice_without_progress_ends_the_job(
    flk: Any, kubectl: Any, image: str, script: Callable[[str], Path]
) -> None:
    folder = script("""
        import os, time
        from flk_runtime.shared import progress
        progress.own_page().record_step(5)
        if os.environ["RANK"] == "1":
            raise ValueError(f"sample {os.getpid()} has no label")
        time.sleep(600)
    """)
    args = ["--name", "twice", "--replicas", "2", "--image", image, *SMALL, *WITHOUT_TORCH]
    assert flk("submit", "train.py", *args, cwd=folder).code == 0
    ended = flk("wait", "twice")
    assert ended.code == 100, ended.stderr
    verdict = "not retried: failed twice at step 5 with the same error"
    assert ended.stderr.count(verdict) == 1
    shown = flk("status", "twice").stdout
    assert f"\n{verdict}\n" in shown
    assert "attempt 2, 1 of 3 restarts and 0 of 100 disruptions used:" in shown
    state = json.loads(flk("status", "twice", "-o", "json").stdout)
    assert (state["no_retry_reason"], state["restarts"], state["max_restarts"]) == (verdict, 1, 3)
    assert [message["no_retry_reason"] for message in messages(kubectl, "twice")] == [verdict] * 2
