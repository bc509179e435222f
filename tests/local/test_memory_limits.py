"""Any limit of the memory for checkpoints: memory is refused at the first save, or enough for any restore."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.collection import often
from tests.support.memory import delete_pods
from tests.support.pods import Pods

TRAIN = """
    import os, pathlib, sys, time, torch, flk_runtime as flk
    from torch import nn

    strategy, steps = sys.argv[1], int(sys.argv[2])
    options = {"shard_size": 2} if strategy == "hybrid_shard" else {}
    run = flk.init(strategy=strategy, device="cpu", save_every=2, log_every=0, seed=1)
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()), **options)
    print("begins at", run.steps)
    while run.steps < steps:
        torch.manual_seed(100 * run.steps + run.rank)
        loss = model(torch.randn(4, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step()
        pathlib.Path(f"pid.{os.environ['FLK_ATTEMPT']}.{run.rank}").write_text(str(os.getpid()))
        pathlib.Path(f"step.{run.rank}").write_text(str(run.steps))
        while run.steps == 7 and os.environ["FLK_ATTEMPT"] == "0":
            time.sleep(0.01)  # until the test ends this attempt
    print("final", run.mean(loss.item()))
"""
SHARD = 4 * (256 * 256 + 256) * 4 * 3 / 4  # bytes of parameters and of two moments, over four ranks
STRATEGIES = ("ddp", "full_shard", "hybrid_shard")
FAULTS = ("killed rank", "lost pod", "lost pod 0")
LIMITS = (0, 0.5, 1.5, 2.5, 3.5, 4.1, 4.6, 5.0, 5.5, 6.5, 9.5)  # in shards; headers and plain values count too


def size(text: str) -> float:
    """Bytes, of a text such as ``1.5 MiB``."""
    number, unit = text.split()
    return float(number) * {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def check(
    forked_pods: Callable[..., Pods],
    root: Path,
    strategy: str,
    fault: str,
    limit: float,
    processes: int = 1,
    storage: Path | None = None,
) -> None:
    """Run a job of four ranks that has one fault under a limit, in shards. ``storage`` gets every other checkpoint."""
    settings = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "1", user_env.LEASE: "10"}
    if storage:
        settings |= {user_env.CHECKPOINT: str(storage), user_env.STORE_EVERY: "4"}
    pods = 4 // processes
    least = 4 * processes  # two files of each own rank, and of each rank of another pod
    job = forked_pods(pods, processes, script=TRAIN, **settings, **{user_env.MEMORY_LIMIT: str(int(limit * SHARD))})
    arguments = ("train.py", strategy, "12")
    job.start(*arguments)
    paths = [job.folder / f"step.{rank}" for rank in range(4)]
    job.until(lambda: all(path.exists() and path.read_text() == "7" for path in paths), "all ranks do step 7")
    if storage:
        job.until(lambda: (storage / "latest").exists(), "step 4 is stored")
    if fault == "killed rank":
        os.kill(job.pid(0, 2), signal.SIGKILL)
    else:
        pod = 0 if fault == "lost pod 0" else pods // 2
        delete_pods(job, root, pod)
        job.start(*arguments, only=pod)
    assert job.wait() == [0] * pods, job.logs_of_all()
    log = job.logs_of_all()
    begun = [int(step) for step in re.findall(r"\[rank 0\] begins at (\d+)", job.log(0))]
    lost = [0, 4] if storage else [0, 0]  # without memory
    used = re.search(r"uses up to ([\d.]+ \w+) of \S+ for them \(limit ([\d.]+ \w+)\)", log)
    refusals = re.findall(r"keeping no checkpoints in memory: .*: ([\d.]+ \w+) are needed .* is ([\d.]+ \w+)", log)
    if limit == 0:
        assert not used, "the user wants none"
        assert not refusals
        assert begun == lost
    elif refusals:
        assert not used
        assert begun == lost, "nothing pretends that it saves"
        assert all(size(need) >= size(most) for need, most in refusals), log
        assert limit < least + 1
    else:
        assert used, log
        assert begun in ([0, 4], [0, 6]), log
        assert size(used[1]) <= size(used[2])
        assert limit > least
        if storage:
            waits = "a save waits for storage while that still writes" in log
            assert waits == (limit < least + processes + 1), "there is no room for a third file of each own rank"
    assert re.search(r"final ([\d.e-]+)", job.log(0)), log


@pytest.mark.promise("Checkpoints: Memory is refused at the first save, or enough for any restore")
@pytest.mark.parametrize(
    ("strategy", "fault", "limit", "processes"),
    often(
        (0,),
        [
            ("ddp", "lost pod 0", 5.0, 1),
            ("hybrid_shard", "lost pod", 5.0, 1),
            ("full_shard", "killed rank", 3.0, 1),
            ("ddp", "lost pod", 20.0, 2),
        ],
    ),
)
def test_a_limit_is_enough_for_restores_or_refused(
    forked_pods: Callable[..., Pods], root: Path, strategy: str, fault: str, limit: float, processes: int
) -> None:
    check(forked_pods, root, strategy, fault, limit, processes)


@pytest.mark.promise("Checkpoints: Memory is refused at the first save, or enough for any restore")
def test_fewer_pods_restore_from_memory_and_need_more_of_it(forked_pods: Callable[..., Pods], root: Path) -> None:
    """Two shards of the lost pod have one copy, and larger shards follow. The limit is just enough for these."""
    settings = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "1", user_env.LEASE: "10"}
    limits = {user_env.MEMORY_LIMIT: str(int(6.2 * SHARD)), pod_env.MIN_PODS: "2"}
    job = forked_pods(4, 1, script=TRAIN, **settings, **limits)
    job.start("train.py", "full_shard", "14")
    paths = [job.folder / f"step.{rank}" for rank in range(4)]
    job.until(lambda: all(path.exists() and path.read_text() == "7" for path in paths), "all ranks do step 7")
    delete_pods(job, root, 3)
    assert [job.running[pod].wait(60) for pod in range(3)] == [0] * 3, job.logs_of_all()
    assert re.findall(r"\[rank 0\] begins at (\d+)", job.log(0)) in (["0", "4"], ["0", "6"])
    assert "keeping no checkpoints" not in job.logs_of_all()


@pytest.mark.soak
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_limit_is_enough_for_restores_or_refused(
    forked_pods: Callable[..., Pods], root: Path, strategy: str, fault: str, limit: float
) -> None:
    check(forked_pods, root, strategy, fault, limit)
