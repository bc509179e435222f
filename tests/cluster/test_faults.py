"""What goes wrong in a cluster, and what flk says and does about it."""

from __future__ import annotations

import re
from multiprocessing.context import ForkServerContext
from typing import Any

import pytest

from tests.support.commands import WITHOUT_TORCH, status
from tests.support.ranks import Ranks

SMALL = ["--cpu", "100m"]


def results(log: str) -> list[float]:
    """The numbers of the one line of results."""
    ((loss, total),) = re.findall(r"^(?:\[rank 0\] )?result (\S+) (\S+)$", log, re.MULTILINE)
    return [float(loss), float(total)]


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
def test_two_faults_and_the_same_result(
    flk: Any, kubectl: Any, image: str, script: Any, fork_server: ForkServerContext, eventually: Any
) -> None:
    """The job has no volume: its checkpoints are in the memory of its pods. Two ranks train undisturbed here."""
    folder = script("""
        import os, time
        from pathlib import Path
        import torch, torch.nn.functional as F
        from torch.utils.data import TensorDataset
        import flk_runtime as flk

        with flk.init() as run:
            Path(__file__).with_name(f"pid-{run.rank}").write_text(str(os.getpid()))
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
            run.print("result", loss.item(), sum(p.sum().item() for p in model.parameters()))
    """)
    calm = Ranks(fork_server, flk.folder)((folder / "train.py").read_text(), 2, {"FAULTS": "0"})

    common = ["--name", "rough", "--image", image, "--replicas", "2", "--save-every", "5", *SMALL]
    # Ranks that wait for the next fault make no steps, and would use up the whole grace period.
    common += ["--grace", "5s", "--env", "FAULTS=2", "--restarts", "1"]
    disturbed = flk("submit", "train.py", *common, cwd=folder)
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
    followed, notes = follower.communicate(timeout=60)
    assert follower.returncode == 0, notes
    assert results(followed) == results(flk("logs", "rough", "--no-follow").stdout)
    # Another build of torch may add up in another order. tests/local compares bits.
    assert results(followed) == pytest.approx(results(calm[0].output), rel=1e-5)
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
