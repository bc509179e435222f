"""Pods that are evicted while a job meets, trains and saves: at most the step that was running is lost."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.preemption import TRAIN

STEPS = 120


@pytest.mark.promise("Recovery: On SIGTERM all ranks save after the same step")
@pytest.mark.soak
def test_evicted_pods_lose_no_step(
    flk: Any, kubectl: Any, image: str, checkpoints_claim: None, eventually: Any, namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAIN))
    common = ["--cpu", "100m", "--image", image, "--checkpoint", "checkpoints:/checkpoints"]
    common += ["--grace", "2m", "--save-every", "50"]

    def submit(name: str, size: list[str], pause: float, save_seconds: float) -> None:
        script = ["train.py", "--name", name, *size, *common, "--", str(STEPS), str(pause), str(save_seconds)]
        submitted = flk("submit", *script, cwd=tmp_path)
        assert submitted.code == 0, submitted.stderr

    def evict(pod: str) -> None:
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/eviction"
        kubectl("create", "--raw", path, "-f", "-", stdin=eviction)

    def state(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(flk("status", name, "-o", "json").stdout)
        assert found["phase"] not in ("Failed", "Succeeded"), found
        return found

    def attempt(number: int) -> Any:
        return next((each for each in state("rough")["attempts"] if each["number"] == number), None)

    def resumed() -> str:
        """What the latest attempt has printed, if it began from a checkpoint."""
        text = str(kubectl("logs", "rough-worker-0")).rpartition("flk-attempt ")[2]
        return text if re.search(r"begins at step [1-9]", text) else ""

    submit("rough", ["--replicas", "3"], 0.3, 3.0)
    eventually("the job trains", lambda: attempt(1) and '"step": 5,' in kubectl("logs", "rough-worker-0"))
    evict("rough-worker-1")
    eventually("the first attempt ends", lambda: attempt(1)["outcome"] == "preempted")
    kubectl("delete", "pod", "rough-worker-2", "--wait=false")  # it waits for pod 1 to come back
    eventually("the job resumes, and saves at step 50 or 100", lambda: "saving a checkpoint" in resumed())
    evict("rough-worker-0")
    submit("calm", ["--processes", "3"], 0.0, 0.0)  # one pod: its ranks share the imports
    ended = flk("wait", "rough")
    assert ended.code == 0, ended.stderr
    assert flk("wait", "calm").code == 0

    def logged(name: str, pattern: str) -> list[str]:
        return re.findall(pattern, flk("logs", name, "--no-follow", "--rank", "0").stdout)

    attempts = json.loads(flk("status", "rough", "-o", "json").stdout)["attempts"]
    saved = [0]
    for each in attempts[:-1]:
        match = re.search(r"rough-worker-\d on \S+ received SIGTERM(?:; saved after step (\d+))?$", each["cause"])
        assert match, attempts
        # An attempt that ended before its first step had nothing to save: the pod was deleted while the pods met.
        saved.append(int(match[1] or saved[-1]))
    # Where pod 1 came back before pod 2 was deleted, the second attempt made some steps and saved them too.
    assert len(set(saved)) in (3, 4), attempts
    begun = [int(step) for step in logged("rough", r"begins at step (\d+)")]
    assert begun[-1] == saved[-1]
    assert set(begun) <= set(saved)
    assert logged("rough", r'"final": (\S+)}') == logged("calm", r'"final": (\S+)}') != []
