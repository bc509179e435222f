"""Two intervals of checkpoints: the memory of the pods keeps every save, and slow storage some of them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import ExitCode, pod_env, user_env
from tests.support.collection import often
from tests.support.memory import delete_pods
from tests.support.pods import END, Pods

# The weight counts the steps down, so that each attempt sees whether its state is of its step.
TRAIN = """
    import contextlib, os, pathlib, sys, time
    import torch, flk_runtime as flk
    from flk_runtime.checkpoint.storage.folder import FolderDestination

    create = FolderDestination.create

    @contextlib.contextmanager
    def slow(destination, step, file):
        while pathlib.Path("slow").exists():
            time.sleep(0.02)
        if pathlib.Path("full").exists():
            raise OSError(28, "No space left on device")
        with create(destination, step, file) as stream:
            yield stream

    FolderDestination.create = slow
    model = torch.nn.Linear(64, 64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if sys.argv[1] in ("adopt", "save"):
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)

    class Saved(contextlib.nullcontext):
        rank = property(lambda self: torch.distributed.get_rank())

        def __enter__(self):
            self.steps = flk.restore(model=model, optimizer=optimizer)
            return self

        def step(self):
            self.steps += 1
            flk.save(self.steps, model=model, optimizer=optimizer)

    def begin():
        if sys.argv[1] == "adopt":
            return flk.adopt(model=model, optimizer=optimizer, log_every=0)
        return Saved() if sys.argv[1] == "save" else flk.init(strategy=sys.argv[1], device="cpu", log_every=0)

    with begin() as run:
        if isinstance(run, flk.Run):
            model, optimizer = run.parallelize(model, optimizer)
        weight = next(model.parameters())
        print("begins at step", run.steps)
        while run.steps < int(sys.argv[2]):
            local = weight.to_local() if hasattr(weight, "to_local") else weight
            assert (local == -run.steps).all(), (run.steps, local)
            optimizer.zero_grad()
            (model(torch.eye(64)).sum()).backward()  # the gradient of each weight is 1
            optimizer.step()
            time.sleep(0.02)
            run.step()
            pathlib.Path(f"pid.{os.environ['FLK_ATTEMPT']}.{run.rank}").write_text(str(os.getpid()))
            pathlib.Path(f"step.{run.rank}").write_text(str(run.steps))
"""


def reach(job: Pods, step: int) -> None:
    paths = [job.folder / f"step.{rank}" for rank in range(2)]
    job.until(lambda: all(path.exists() and int(path.read_text() or 0) >= step for path in paths), f"step {step}")


def begun(job: Pods) -> list[int]:
    return [int(text) for text in re.findall(r"\[rank 0\] begins at step (\d+)", job.log(0))]


def stored(job: Pods) -> list[int]:
    return sorted(int(path.name[5:]) for path in (job.folder / "checkpoint").glob("step-*"))


@pytest.mark.parametrize("strategy", often((2,), ["ddp", "full_shard", "adopt", "save"]))
def test_memory_goes_on_while_storage_is_slow_and_each_restores_what_it_is_for(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path, strategy: str
) -> None:
    settings = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "5", user_env.LEASE: "10", pod_env.GRACE: "20"}
    settings |= {
        user_env.SAVE_EVERY: "1",
        user_env.STORE_EVERY: "10",
        user_env.CHECKPOINT: str(tmp_path / "checkpoint"),
    }
    job = forked_pods(2, 1, script=TRAIN, **settings)
    job.start("train.py", strategy, "100000")
    job.until(lambda: stored(job) != [], "something is stored")
    slow = job.folder / "slow"
    slow.touch()
    first = stored(job)[-1]
    reach(job, first + 45)  # two saves that were due are put off
    assert stored(job)[-1] <= first + 10, "what was being written when storage became slow"
    os.kill(job.pid(0, 1), signal.SIGKILL)
    job.until(lambda: len(begun(job)) == 2, "the second attempt begins")
    assert begun(job)[1] >= first + 44, "the newest in memory, and not what is stored"
    assert job.log(0).count("takes longer than its interval") == 1
    slow.unlink()
    before = stored(job)[-1]
    job.until(lambda: stored(job)[-1] > before, "the save that was due is stored")
    delete_pods(job, root, 0, 1)
    newest = int((job.folder / "checkpoint" / "latest").read_text().split()[0][5:])  # others are not stored yet
    job.start("train.py", strategy, "100000")
    job.until(lambda: len(begun(job)) == 3, "the job begins again")
    assert begun(job)[2] == newest, "the newest in storage, since all memory is lost"
    if strategy == "save":
        return  # SIGTERM stores nothing that the script does not
    reach(job, newest + 13)
    slow.touch()
    reach(job, newest + 25)
    job.running[1].terminate()
    job.until(lambda: "all ranks stop after step" in job.log(0), "the last step is agreed upon")
    slow.unlink()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    (step,) = re.findall(r"all ranks stop after step (\d+) to save", job.logs_of_all())
    assert stored(job)[-1] == int(step), "SIGTERM stores the last state too"
    job.start("train.py", strategy, "100000", only=1)
    job.until(lambda: len(begun(job)) == 4, "the job goes on")
    assert begun(job)[-1] == int(step)
