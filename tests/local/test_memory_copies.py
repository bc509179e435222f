"""How many copies of the state a pod holds while it saves and restores, and what it receives of other pods."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.memory import folder_of
from tests.support.pods import Pods

STATE = 3 * 4 * 48 * 512 * 512  # bytes: parameters and two moments
# A thread samples the anonymous memory of the rank and of its launcher: what is neither a file nor in /dev/shm.
TRAIN = """
    import os, pathlib, threading, time, torch, flk_runtime as flk
    from flk_runtime.checkpoint.gather import PodReader

    def anonymous():
        texts = [pathlib.Path(f"/proc/{pid}/status").read_text() for pid in (os.getpid(), os.getppid())]
        return sum(int(text.split("RssAnon:")[1].split()[0]) << 10 for text in texts)

    peak, attempt = 0, os.environ["FLK_ATTEMPT"]
    every = int(os.environ.get("WAITED_FOR", "0"))  # the interval of storage, if each save there is waited for
    latest = pathlib.Path(os.environ["FLK_CHECKPOINT"], "latest")

    def stored(step):
        return latest.exists() and latest.read_text().split()[0].endswith(f"{step:09}")

    def read_data(reader, *args, plain=PodReader.read_data):
        result = plain(reader, *args)
        print("received", reader.received)
        return result

    PodReader.read_data = read_data

    def watch():
        global peak
        while True:
            peak = max(peak, anonymous())
            time.sleep(0.002)

    with flk.init(device="cpu", log_every=0) as run:
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(48)])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        if attempt == "0":
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            flk.replicated(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        before = peak = anonymous()
        threading.Thread(target=watch, daemon=True).start()
        model, optimizer = run.parallelize(model, optimizer)
        print("restoring takes", peak - before)
        before = peak = anonymous()
        for _ in range(6):
            run.step()  # nothing but saves
            time.sleep(0.1)
            while every and run.steps % every == 0 and not stored(run.steps):
                time.sleep(0.01)
        print("saving takes", peak - before)
        pathlib.Path(f"pid.{attempt}.{run.rank}").write_text(str(os.getpid()))
        while attempt == "0":
            time.sleep(0.1)
"""


@pytest.mark.soak
@pytest.mark.parametrize(("store_every", "waited", "most"), [(None, False, 2.1), ("2", True, 2.1), ("2", False, 2.6)])
def test_copies(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path, store_every: str | None, waited: bool, most: float
) -> None:
    settings = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "1", user_env.LEASE: "5", user_env.SAVE_EVERY: "1"}
    settings[user_env.CHECKPOINT] = str(tmp_path / "checkpoint")
    if store_every:
        settings[user_env.STORE_EVERY] = store_every
        settings["WAITED_FOR"] = store_every if waited else "0"
    job = forked_pods(2, 1, script=TRAIN, **settings)
    job.start("train.py")
    pids = [job.pid(0, rank) for rank in range(2)]
    files = [sum(path.stat().st_blocks << 9 for path in folder_of(root, pod).iterdir()) / STATE for pod in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait() == [0, 0], job.logs_of_all()
    log = job.logs_of_all()
    took = {
        name: [int(each) / STATE for each in re.findall(rf"{name} takes (\d+)", log)]
        for name in ("saving", "restoring")
    }
    assert len(took["restoring"]) == 4
    assert set(re.findall(r"received (\d+)", log)) == {"0"}, "each pod of two holds copies of the other one's shards"
    assert max(files) + max(took["saving"]) <= most
    moments = 2 / 3  # of the state, which the optimizer does not have before
    assert max(files) + max(took["restoring"]) - moments <= most
