"""The same job as a TrainJob, a JobSet and an indexed Job: same numbers, same states, same commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from flk.targets import TARGETS

STEPS = 300
# The youngest process of the runtime in a pod is a rank. The brackets keep the shell from finding itself.
KILL = """
for process in $(ls /proc | grep -E '^[0-9]+$' | sort -rn); do
  grep -q flk[_]runtime /proc/$process/cmdline && kill -9 $process && exit
done
"""


@pytest.fixture
def no_jobs_stay(trainer: None, kubectl: Any) -> Iterator[None]:
    """Deletes the jobs of a test when it ends: each would keep its namespace."""
    yield
    kubectl("delete", "pytorchjobs,trainjobs,jobsets,jobs", "--all", "--wait=false")


def state(flk: Any, job: str) -> dict[str, Any]:
    result = flk("status", job, "-o", "json")
    assert result.code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def last_loss(flk: Any, job: str) -> float:
    lines = flk("logs", job, "--no-follow", "--rank", "0").stdout.splitlines()
    metrics = [json.loads(line.removeprefix("[rank 0] ")) for line in lines if line.startswith('[rank 0] {"step"')]
    assert metrics[-1]["step"] == STEPS, lines
    return float(metrics[-1]["heldout_loss"])


@pytest.mark.soak
@pytest.mark.timeout(1800, func_only=True)
def test_same_loss_after_a_killed_rank_and_a_deleted_pod(
    flk: Any, kubectl: Any, image: str, checkpoints_claim: None, no_jobs_stay: None, eventually: Callable[..., Any]
) -> None:
    """A PyTorchJob that nobody disturbs and a disturbed job of each target end with the same loss, to the bit."""
    options = ["--replicas", "2", "--cpu", "100m", "--image", image, "--checkpoint", "checkpoints:/checkpoints"]
    options += ["--save-every", "20"]

    def submit(name: str, target: str) -> None:
        submitted = flk("submit", "--name", name, "--target", target, *options, "--", "--steps", str(STEPS))
        assert submitted.code == 0, submitted.stderr

    def pod(target: str) -> str:
        """The newest pod with index 1."""
        pods = kubectl.json("get", "pods", "-l", f"flk.dev/job=on-{target}")["items"]
        mine = [pod for pod in pods if TARGETS[target].position(pod)[1] == 1]
        newest: str = max(mine, key=lambda p: p["metadata"]["creationTimestamp"])["metadata"]["name"]
        return newest

    def trains(target: str) -> bool:
        return '"step": 10,' in flk("logs", f"on-{target}", "--no-follow").stdout

    def attempts(target: str) -> int:
        found = state(flk, f"on-{target}")
        assert found["phase"] != "Failed", found
        return len(found["attempts"])

    def disturb(target: str) -> None:
        """Submit a job, kill a rank while it trains, and delete a pod while it trains again."""
        submit(f"on-{target}", target)
        eventually(f"{target} trains", lambda: trains(target))
        kubectl("exec", pod(target), "--", "sh", "-c", KILL)
        eventually(f"{target} starts its ranks again", lambda: attempts(target) >= 2)
        kubectl("delete", "pod", pod(target), "--wait=false")
        eventually(f"{target} starts with a new pod", lambda: attempts(target) >= 3)

    submit("calm", "pytorchjob")
    with ThreadPoolExecutor(max_workers=2) as pool:
        for disturbed in [pool.submit(disturb, target) for target in TARGETS]:
            disturbed.result()
    names = ("calm", *(f"on-{target}" for target in TARGETS))
    for name in names:
        ended = flk("wait", name, timeout=500)
        assert ended.code == 0, ended.stderr
    losses = {name: last_loss(flk, name) for name in names}
    assert len(set(losses.values())) == 1, losses
    assert all(state(flk, name)["phase"] == "Succeeded" for name in names)
    assert set(flk("list", "-o", "name").stdout.split()) == {
        "pytorchjob.kubeflow.org/calm",
        "pytorchjob.kubeflow.org/on-pytorchjob",
        "trainjob.trainer.kubeflow.org/on-trainjob",
        "jobset.jobset.x-k8s.io/on-jobset",
        "job.batch/on-job",
    }
