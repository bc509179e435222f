"""An elastic job on a cluster without a volume for checkpoints: pods are deleted, return and are removed."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.elastic import SAMPLES, TRAIN, samples_by_step

EPOCHS = 3
# The volume is for the log of samples only. The file `hurry` in it says that the test has seen all that it waits for.
SCRIPT = TRAIN.replace("time.sleep(pause)", 'time.sleep(0.0 if (folder / "hurry").exists() else pause)') + (
    """
        torch.distributed.barrier()
        for path in sorted(folder.glob("took.*")) if run.rank == 0 else ():
            for line in path.read_text().splitlines():
                print("samples", path.name, line)
"""
)
COMMON = ["--cpu", "100m", "--save-every", "10", "--grace", "1m", "--volume", "samples:/samples"]


class Training:
    """One job that writes down the samples of each step."""

    def __init__(self, flk: Any, kubectl: Any, eventually: Any, name: str) -> None:
        self.flk, self.kubectl, self.eventually, self.name = flk, kubectl, eventually, name

    def attempts(self) -> list[dict[str, Any]]:
        state = json.loads(self.flk("status", self.name, "-o", "json").stdout)
        assert state["phase"] != "Failed", state
        attempts: list[dict[str, Any]] = state["attempts"]
        return attempts

    def train(self, what: str, pods: int, attempts: int) -> None:
        """Wait until so many pods train, in the given attempt or a later one, and have made some steps."""

        def check() -> bool:
            found = self.attempts()
            if not found or found[-1]["outcome"] != "running" or found[-1]["pods"] != pods or len(found) < attempts:
                return False
            count = f"cat /samples/took.{len(found) - 1}.0 2> /dev/null | wc -l"
            return int(self.kubectl("exec", f"{self.name}-worker-0", "--", "sh", "-c", count)) > 2

        self.eventually(what, check)

    def hurry(self) -> None:
        self.kubectl("exec", f"{self.name}-worker-0", "--", "touch", "/samples/hurry")

    def end(self, folder: Path, batch: int) -> dict[str, Any]:
        """Wait for the end, assert that each epoch has taken each sample once, and return the last status.

        ``batch`` is the number of samples in a step.
        """
        ended = self.flk("wait", self.name)
        assert ended.code == 0, ended.stderr
        log = self.flk("logs", self.name, "--no-follow", "--rank", "0").stdout
        for name, line in re.findall(r"samples (took\.\d+\.\d+) (\[.*\])", log):
            with open(folder / name, "a") as file:
                file.write(line + "\n")
        steps, length = samples_by_step(folder), SAMPLES // batch
        for epoch in range(EPOCHS):
            taken = [index for step in range(epoch * length, (epoch + 1) * length) for index in steps.pop(step, [])]
            assert sorted(taken) == list(range(SAMPLES)), f"epoch {epoch}"
        assert not steps
        status: dict[str, Any] = json.loads(self.flk("status", self.name, "-o", "json").stdout)
        return status


@pytest.fixture
def submit(flk: Any, kubectl: Any, image: str, shared_class: str, eventually: Any, tmp_path: Path) -> Any:
    def submit(name: str, *options: str) -> Training:
        spec = {
            "storageClassName": shared_class,
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "100Mi"}},
        }
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "samples"}, "spec": spec}
        kubectl("create", "-f", "-", stdin=claim)
        (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
        script = ["train.py", "--name", name, "--image", image, *COMMON, *options, "--", "/samples", "1", str(EPOCHS)]
        submitted = flk("submit", *script, cwd=tmp_path)
        assert submitted.code == 0, submitted.stderr
        return Training(flk, kubectl, eventually, name)

    return submit


@pytest.mark.promise("Recovery: An elastic job trains each sample once while pods leave and join")
@pytest.mark.soak
def test_an_elastic_job_changes_its_size_by_deletion_and_by_scale(
    submit: Callable[..., Training], tmp_path: Path
) -> None:
    job = submit("stretch", "--elastic", "2:4")
    job.train("four pods train", 4, 1)
    job.kubectl("delete", "pod", "stretch-worker-2", "--wait=false")
    job.train("four pods train again", 4, 3)
    assert job.flk("scale", "stretch", "3").code == 0
    job.train("three pods train", 3, 4)
    job.hurry()
    status = job.end(tmp_path, batch=8)
    attempts = status["attempts"]
    sizes = [each["pods"] for each in attempts]
    assert sizes[-1] == 3
    assert [4, 3, 4] in [sizes[first : first + 3] for first in range(len(sizes))], sizes
    assert {each["outcome"] for each in attempts[:-1]} == {"resized"}
    assert (status["restarts"], status["disruptions"]) == (0, 0)
    assert [each["restored_from"] for each in attempts] == ["start"] + ["memory"] * (len(attempts) - 1)
