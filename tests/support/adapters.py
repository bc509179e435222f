"""The job of two pods in which the tests of adapters train, and its end when a pod must go."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.curves import last, printed, tensorboard_points
from tests.support.pods import Pods


def start(
    forked_pods: Callable[..., Pods], root: Path, script: str, restarts: int, *arguments: str, **variables: str
) -> Pods:
    """Start ``script`` in two pods of one rank that keep checkpoints in memory, in ``root``.

    A script that writes to TensorBoard imports what that needs before its first step: it has 3 seconds to write its
    last line after a failure, which an import may take on a busy machine.
    """
    if user_env.METRICS in variables:
        script = f"""
    import os
    if os.environ["RANK"] == "0":
        import torch.utils.tensorboard.summary
{script}"""
    variables |= {
        pod_env.MEMORY_ROOT: str(root),
        user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER,
        pod_env.RESTARTS: str(restarts),
    }
    job = forked_pods(2, 1, script=script, **variables)
    job.start("train.py", *arguments)
    return job


def ends_saved(job: Pods) -> None:
    """Send SIGTERM to both pods of a job that waits for the file ``go``, and check that its ranks save and end."""
    for pod in job.running.values():
        pod.send_signal(signal.SIGTERM)
    job.until(lambda: "SIGTERM" in job.log(0), "the launchers have got the signal")
    (job.folder / "go").touch()
    assert job.wait() == [143, 143], job.logs_of_all()
    assert re.search(r"stopped after step \d+, which is saved", job.log(0))


def metrics_of(folder: Path) -> dict[str, str]:
    """The variable with which a job writes to TensorBoard, below ``folder``."""
    return {user_env.METRICS: f"tensorboard:{folder}/curves"}


def assert_curve(job: Pods, steps: list[int]) -> None:
    """Assert that TensorBoard has one run with the loss of these steps, and all numbers that rank 0 has printed."""
    (curve,) = tensorboard_points(job.folder / "curves").values()
    assert curve == pytest.approx(last(printed(job.log(0))), rel=1e-6), (curve, job.log(0))
    assert sorted(step for name, step in curve if name == "loss") == steps, curve
