"""The same job as a TrainJob, a JobSet and an indexed Job: same numbers, same states, same commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flk.targets import TARGETS

OTHERS = ("trainjob", "jobset", "job")
STEPS = 300
# The youngest process of the runtime in a pod is a rank. The brackets keep the shell from finding itself.
KILL = """
for process in $(ls /proc | grep -E '^[0-9]+$' | sort -rn); do
  grep -q flk[_]runtime /proc/$process/cmdline && kill -9 $process && exit
done
"""
NEVER_ENDING = "import signal\nwhile True:\n    signal.pause()\n"


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


@pytest.mark.soak
@pytest.mark.timeout(900, func_only=True)
def test_states_and_commands(
    flk: Any, kubectl: Any, image: str, no_jobs_stay: None, eventually: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "never.py").write_text(NEVER_ENDING)
    (tmp_path / "broken.py").write_text("raise ValueError('shard 2 is damaged')\n")
    small = ["--cpu", "50m", "--image", image]
    jobs = {
        "missing": ["never.py", "--cpu", "50m", "--image", "flktrain/flk:no-such-tag"],
        "large": ["never.py", "--cpu", "900", "--image", image],
        "broken": ["broken.py", "--restarts", "0", *small],
        "runs": ["never.py", "--replicas", "2", "--label", "case=runs", *small],
    }
    for target in OTHERS:
        for name, words in jobs.items():
            submitted = flk("submit", *words, "--name", f"{name}-{target}", "--target", target, cwd=tmp_path)
            assert submitted.code == 0, submitted.stderr

    def phase(name: str, wanted: str) -> bool:
        found = state(flk, name)
        return bool(found["phase"] == wanted)

    # Of several names and of labels, jobs are found by a list that has their metadata alone.
    ended = flk("wait", *(f"broken-{target}" for target in OTHERS))
    assert (ended.code, ended.stderr.count("ValueError: shard 2 is damaged") >= 3) == (100, True), ended.stderr
    chosen = flk("status", "-l", "case=runs", "-o", "name")
    assert {each.partition("/")[2] for each in chosen.stdout.split()} == {f"runs-{target}" for target in OTHERS}
    assert not any(each.startswith("pytorchjob") for each in chosen.stdout.split())
    for target in OTHERS:
        ended = flk("wait", f"broken-{target}")
        assert (ended.code, "ValueError: shard 2 is damaged" in ended.stderr) == (100, True), ended.stderr
        ended = flk("wait", f"missing-{target}")
        assert ended.code == 104, ended.stderr
        assert "flktrain/flk:no-such-tag" in ended.stderr
        assert "no node has 900 cpu" in flk("why", f"large-{target}").stdout
        name = f"runs-{target}"
        eventually(f"{name} runs", lambda name=name: phase(name, "Running"))
        assert flk("exec", name, "--rank", "1", "--", "printenv", "FLK_POD_INDEX").stdout.strip() == "1"
        eventually("its stacks are shown", lambda name=name: "signal.pause()" in flk("stacks", name).stdout)
        assert flk("suspend", name).code == 0
        assert state(flk, name)["phase"] == "Suspended"
        assert kubectl.json("get", "pods", "-l", f"flk.dev/job={name}")["items"] == []
        assert "Suspended" in flk("why", name).stdout
        assert flk("resume", name).code == 0
        eventually(f"{name} runs again", lambda name=name: phase(name, "Running"))
        assert flk("restart", f"broken-{target}").code == 0
        eventually("the restarted job fails anew", lambda target=target: phase(f"broken-{target}", "Failed"))
        for each in jobs:
            assert flk("delete", f"{each}-{target}").code == 0
        assert f"-{target}-" not in kubectl("get", "pods", "-l", "flk.dev/job", "-o", "name")
        kinds = "services,configmaps,secrets,jobsets,jobs"
        eventually(
            "nothing is left",
            lambda target=target, kinds=kinds: f"-{target}" not in kubectl("get", kinds, "-o", "name"),
        )
