"""The restart policy in a cluster: which failures are final, and what the training operator does with a pod."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH
from tests.support.terminations import terminations

SMALL = ["--cpu", "50m"]
PACKAGES = "/opt/venv/lib/python3.11/site-packages"  # in flk's image
DEADLINE, USED = 40, 20  # seconds of a job, and what its first pod uses of them at least
BUSYBOX = "busybox:1.35"  # on each node of kind, for its storage; it has a shell and no Python


def messages(kubectl: Any, job: str) -> list[dict[str, Any]]:
    """The termination messages of all pods of a job."""
    ends = terminations(kubectl, job)
    assert all(end["message"].startswith("{") for end in ends), ends
    return [json.loads(end["message"]) for end in ends]


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


def without_torch(folder: Path) -> list[str]:
    container = {"name": "pytorch", "volumeMounts": [{"name": "empty", "mountPath": PACKAGES}]}
    patch = {"spec": {"containers": [container], "volumes": [{"name": "empty", "emptyDir": {}}]}}
    (folder / "patch.yaml").write_text(json.dumps(patch))
    return ["--patch", "patch.yaml"]


@pytest.mark.parametrize("missing", ["Python", "torch"])
def test_an_image_without_python_or_torch_ends_the_job(
    flk: Any, kubectl: Any, image: str, script: Callable[[str], Path], missing: str
) -> None:
    folder, name = script("print('never')"), f"no-{missing.lower()}"
    options = ["--image", BUSYBOX] if missing == "Python" else ["--image", image, *without_torch(folder)]
    args = ["--name", name, "--replicas", "2", *options, *SMALL]
    assert flk("submit", "train.py", *args, cwd=folder).code == 0
    ended = flk("wait", name, "--timeout", "120s")
    assert ended.code == 2, ended.stderr
    words = "the image has no python3" if missing == "Python" else "cannot import torch"
    for text in (ended.stderr, flk("status", name).stdout):
        assert f"{name}-worker-" in text
        assert words in text
        assert "not retried: the next attempt would fail in the same way" in text
    assert {message["failure"]["kind"] for message in messages(kubectl, name)} == {"usage"}


def test_a_replaced_pod_has_the_rest_of_the_deadline(
    flk: Any, kubectl: Any, image: str, script: Callable[[str], Path]
) -> None:
    folder = script("import time; time.sleep(600)")
    args = ["--name", "late", "--image", image, "--deadline", f"{DEADLINE}s", *SMALL, *WITHOUT_TORCH]
    assert flk("submit", "train.py", *args, cwd=folder).code == 0
    assert flk("wait", "late", "--for", "running").code == 0
    began = time.time()
    time.sleep(USED)  # for the deadline to be over in part
    kubectl("delete", "pod", "late-worker-0")
    assert flk("wait", "late").code == 124
    late = json.loads(flk("status", "late", "-o", "json").stdout)
    assert late["reason"] == "DeadlineExceeded"
    last = late["attempts"][-1]
    assert last["started"] > began + USED
    assert last["ended"] - last["started"] < DEADLINE - USED + 2


@pytest.mark.soak
def test_pods_that_are_all_deleted_use_one_disruption(
    flk: Any, kubectl: Any, image: str, script: Callable[[str], Path], checkpoints_claim: None, eventually: Any
) -> None:
    """No launcher is left to count: the next one reads the record on the volume of the checkpoints."""
    args = ["--name", "gone", "--image", image, "--checkpoint", "checkpoints:/checkpoints", *SMALL, *WITHOUT_TORCH]
    folder = script("import time; time.sleep(600)")
    assert flk("submit", "train.py", *args, "--max-disruptions", "1", cwd=folder).code == 0

    def attempts() -> list[tuple[int, str]]:
        found = json.loads(flk("status", "gone", "-o", "json").stdout)["attempts"]
        return [(each["number"], each["outcome"]) for each in found]

    eventually("the first attempt runs", lambda: attempts() == [(1, "running")])
    kubectl("delete", "pod", "gone-worker-0")
    eventually("the second attempt runs", lambda: attempts() == [(1, "preempted"), (2, "running")])
    kubectl("delete", "pod", "gone-worker-0")
    ended = flk("wait", "gone")
    assert ended.code == 104, ended.stderr
    assert attempts() == [(1, "preempted"), (2, "preempted")]
