"""Hangs in real processes: which rank is named, why, with which stack; and jobs that are slow but do not hang."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flk_runtime.contract import ExitCode, log_format, user_env
from flk_runtime.contract.record import JobRecord
from tests.support.collection import often
from tests.support.old_torch import needs_torch
from tests.support.pods import Pods

LIMIT = 2  # seconds without progress
QUICK = {user_env.HANG_TIMEOUT: str(LIMIT), user_env.LEASE: "3"}  # launchers speak every second

# Three ranks in three pods reduce in a loop; from step 5 on rank 1 is stuck, as {fault} says. Before, rank 1 has sent
# to the others, which must not count as collectives: ranks differ in it.
SCRIPT = """
    import ctypes, os, pathlib, signal, sys, threading, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    others = [each for each in range(dist.get_world_size()) if each != 1] if rank == 1 else [1]
    [(dist.send if rank == 1 else dist.recv)(torch.ones(1), other) for other in others]

    def stuck():
        {fault}

    for step in range(1_000_000):
        if step == 5 and rank == 1:
            pathlib.Path("stuck").touch()
            stuck()
        dist.all_reduce(torch.ones(1))
        time.sleep(0.01)
"""
SLEEP = "time.sleep(1000)"
LOCK = "lock = threading.Lock(); lock.acquire(); lock.acquire()"
# The signal for the stacks ends a sleep of C early.
NATIVE = """
        while True:
            ctypes.PyDLL(None).sleep(1000)  # PyDLL keeps the GIL
"""
IMPORT = """
        pathlib.Path("first.py").write_text(
            "import threading, time\\ndef load():\\n    import second\\n"
            "thread = threading.Thread(target=load); thread.start(); time.sleep(0.3); thread.join()\\n"
        )
        pathlib.Path("second.py").write_text("from first import name\\n")
        import first
"""
LOADER = """
        from torch.utils.data import DataLoader

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                time.sleep(1000)

        for batch in DataLoader(Numbers(), num_workers=1):
            pass
"""
SKIP = "dist.broadcast(torch.ones(1), 0)"
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
recorded = needs_torch((2, 8), "only a newer one has a flight recorder for gloo")


@pytest.mark.promise("Recovery: A hang ends with the rank, its stack and the cause")
@pytest.mark.parametrize(
    ("fault", "cause", "line"),
    often(
        (2, 5),
        [
            (SLEEP, "did not reach all_reduce 6; it is at train.py:11 in stuck", "time.sleep(1000)"),
            (LOCK, "did not reach all_reduce 6; it is at train.py:11 in stuck", "lock.acquire()"),
            (NATIVE, "in native code that holds Python's lock (GIL)", "ctypes.PyDLL(None).sleep(1000)"),
            (IMPORT, "it imports a module", "from first import name"),
            (LOADER, "it waits in its DataLoader for a worker process", "in __getitem__: time.sleep(1000)"),
            pytest.param(
                *(SKIP, "is in broadcast 6, the others in all_reduce 6", "dist.broadcast(torch.ones(1), 0)"),
                marks=recorded,
            ),
            (STOP, "did not reach all_reduce 6; it is stopped (SIGSTOP)", "no Python stack"),
        ],
    ),
    ids=["sleep", "lock", "native code with the GIL", "import", "DataLoader", "other collective", "SIGSTOP"],
)
def test_a_hang_ends_with_the_rank_that_is_stuck(
    forked_pods: Callable[..., Pods], fault: str, cause: str, line: str
) -> None:
    job = forked_pods(3, 1, script=SCRIPT.replace("{fault}", fault.lstrip("\n ")), **QUICK)
    job.start("train.py")
    job.until((job.folder / "stuck").exists, "rank 1 is stuck")
    assert job.wait() == [ExitCode.INFRASTRUCTURE] * 3, job.logs_of_all()
    for pod in range(3):
        failure = job.record(pod).failure
        assert failure is not None
        assert (failure.kind, failure.rank, failure.pod_name) == ("hang", 1, "test-worker-1")
        assert cause in failure.summary
        assert line in failure.details, failure.details
    log = job.log()
    assert log.index("rank 1 in test-worker-1") < log.index("ranks 0, 2"), log


# The loop of a script whose state flk keeps.
ADOPTED = """
    import time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = flk.adopt(model=model, optimizer=optimizer)
    while True:
        if loop.steps == 5 and loop.rank == 1:
            time.sleep(1000)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        loop.step()
"""


def test_a_hang_in_a_loop_of_the_scripts_own_is_found(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(1, 2, script=ADOPTED, **QUICK)
    job.start("train.py")
    assert job.wait() == [ExitCode.INFRASTRUCTURE], job.log()
    failure = job.record().failure
    assert failure is not None
    assert (failure.kind, failure.rank, failure.step) == ("hang", 1, 5)
    assert "time.sleep(1000)" in failure.details


# While rank 0 waits in a collective, rank 1 works for twice the limit in each of these ways, without a step.
SLOW = """
    import os, pathlib, subprocess, sys, time
    import torch, torch.distributed as dist
    import flk_runtime

    dist.init_process_group("gloo")

    def work(sign, interval=0.5):
        end = time.monotonic() + 2 * {limit}
        while time.monotonic() < end:
            sign()
            time.sleep(interval)

    if dist.get_rank() == 1:
        work(lambda: None, 0)  # compiles
        work(lambda: print("evaluated another batch"))
        work(flk_runtime.heartbeat)
        work(pathlib.Path(os.environ["FLK_HEARTBEAT"]).touch)
    dist.all_reduce(torch.ones(1))
"""


@pytest.mark.promise("Recovery: A hang ends with the rank, its stack and the cause")
def test_a_rank_that_works_for_long_is_no_hang(forked_pods: Callable[..., Pods]) -> None:
    limit = 3  # a busy machine may let a process wait for a second or two
    job = forked_pods(2, 1, script=SLOW.format(limit=limit), **QUICK | {user_env.HANG_TIMEOUT: str(limit)})
    job.start("train.py")
    assert job.wait() == [ExitCode.DONE] * 2, job.logs_of_all()


def test_ranks_that_all_compute_without_a_word_are_no_hang(forked_pods: Callable[..., Pods]) -> None:
    script = f"import time\nend = time.monotonic() + {2 * LIMIT}\nwhile time.monotonic() < end: pass"
    job = forked_pods(1, 2, script=script, **QUICK)
    job.start("train.py")
    assert job.wait() == [ExitCode.DONE], job.log()


# Rank 2 computes for longer than the others in each step.
STRAGGLER = """
    import time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    while True:
        time.sleep(0.05 if dist.get_rank() == 2 else 0.01)
        dist.all_reduce(torch.ones(1))
"""


@recorded
def test_a_slow_rank_is_in_the_record(forked_pods: Callable[..., Pods]) -> None:
    job = forked_pods(3, 1, script=STRAGGLER, **QUICK, FLK_NODE_NAME="node-a", FLK_SLOW_WINDOW="10")
    job.start("train.py")

    def records() -> list[JobRecord]:
        found = [log_format.parse_record(line) for line in job.log().splitlines()]
        return [record for record in found if record and record.slow]

    job.until(lambda: bool(records()), "a rank is slow")
    slow = records()[0].slow
    assert [(each.rank, each.pod_name, each.node) for each in slow] == [(2, "test-worker-2", "node-a")]
    assert slow[0].factor >= 1.5
    job.kill()
