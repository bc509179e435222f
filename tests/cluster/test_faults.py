"""What goes wrong in a cluster, and what flk says and does about it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH

SMALL = ["--cpu", "100m"]


def status(flk: Any, job: str) -> dict[str, Any]:
    result = flk("status", job, "-o", "json")
    assert result.code == 0, result.stderr
    state: dict[str, Any] = json.loads(result.stdout)
    return state


@pytest.mark.promise("Recovery: A container that exceeds its memory limit says so")
def test_memory_limit(flk: Any, image: str, script: Any) -> None:
    folder = script("""
        import os, time
        hoard = []
        while os.environ["RANK"] == "1":
            hoard.append(bytearray(os.urandom(1 << 20) * 32))
        time.sleep(600)
    """)
    args = ["--name", "greedy", "--replicas", "2", "--restarts", "0", "--image", image, "--memory", "600Mi", *SMALL]
    args += WITHOUT_TORCH
    assert flk("submit", "train.py", *args, cwd=folder).code == 0
    ended = flk("wait", "greedy")
    assert ended.code == 104, ended.stderr
    for text in (ended.stderr, flk("status", "greedy").stdout):
        assert "greedy-worker-1 ran out of memory" in text
        assert "600Mi" in text


@pytest.mark.promise("Recovery: A rank or pod that dies costs no result, and no volume is needed")
def test_two_faults_and_the_same_result(flk: Any, kubectl: Any, image: str, script: Any, eventually: Any) -> None:
    """The job has no volume: its checkpoints are in the memory of its pods."""
    folder = script("""
        import os, sys, time
        import torch, torch.nn.functional as F
        from torch.utils.data import TensorDataset
        import flk_runtime as flk

        with flk.init() as run:
            open(f"pid-{run.rank}", "w").write(str(os.getpid()))
            torch.manual_seed(0)
            x = torch.randn(512, 8)
            data = TensorDataset(x, x.sum(1, keepdim=True))
            model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
            model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
            loader = run.loader(data, 4)
            for inputs, targets in loader.steps(60):
                loss = F.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.step(loss=loss)
                print("step", run.steps, flush=True)
                # Far enough, and then until the two faults have happened, so that no machine is too fast for them.
                while int(os.environ["FAULTS"]) > run.attempt and run.steps >= 10 * (run.attempt + 1):
                    time.sleep(1)
            run.print("result", loss.item().hex(), sum(p.sum().item() for p in model.parameters()).hex())
    """)
    common = ["--image", image, "--save-every", "5", *SMALL]
    # Ranks that wait for the next fault make no steps, and would use up the whole grace period.
    common += ["--grace", "5s"]

    def result(name: str) -> list[str]:
        lines = flk("logs", name, "--no-follow").stdout.splitlines()
        return [line for line in lines if line.startswith("[rank 0] result")]

    # The ranks of one pod share the imports, which take most of the processor time.
    calm = ["--name", "calm", "--replicas", "1", "--processes", "2", "--env", "FAULTS=0"]
    plain = flk("submit", "train.py", *calm, *common, "--follow", cwd=folder)
    assert plain.code == 0, plain.stderr

    rough = ["--name", "rough", "--replicas", "2", "--env", "FAULTS=2", "--restarts", "1"]
    disturbed = flk("submit", "train.py", *rough, *common, cwd=folder)
    assert disturbed.code == 0, disturbed.stderr

    follower = flk.start("logs", "rough")

    def training(attempt: int) -> bool:
        state = status(flk, "rough")
        assert state["phase"] not in ("Failed", "Succeeded"), state
        return len(state["attempts"]) == attempt and state["phase"] == "Running"

    def step(number: int) -> bool:
        return f'"step": {number},' in kubectl("logs", "rough-worker-0")

    eventually("the first attempt gets to step 10", lambda: training(1) and step(10))
    kubectl("exec", "rough-worker-1", "--", "sh", "-c", "kill -9 $(cat /flk/work/pid-1)")
    eventually("the second attempt gets to step 20", lambda: training(2) and step(20))
    kubectl("delete", "pod", "rough-worker-0")

    ended = flk("wait", "rough")
    assert ended.code == 0, ended.stderr
    assert result("rough") == result("calm") != []
    followed, notes = follower.communicate(timeout=60)
    assert follower.returncode == 0, notes
    assert [line for line in followed.splitlines() if line.startswith("[rank 0] result")] == result("rough")
    assert "rough-worker-0 was recreated" in notes
    state = status(flk, "rough")
    assert (state["restarts"], state["disruptions"], state["max_disruptions"]) == (1, 1, 100)
    attempts = state["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["failed", "preempted", "succeeded"]
    causes = [attempt["cause"] for attempt in attempts]
    assert "rank 1 in rough-worker-1 was killed by SIGKILL" in causes[0]
    assert re.search(r"rough-worker-0 on \S+ received SIGTERM", causes[1])
    assert [attempt["restored_from"] for attempt in attempts[1:]] == ["memory"] * 2, attempts
    assert all(attempt["steps_lost"] <= 5 for attempt in attempts[1:] if attempt["steps_lost"] is not None), attempts
