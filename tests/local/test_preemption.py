"""SIGTERM to one pod of a job, or to all: what is saved, who waits for whom, and where the next attempt begins."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import ExitCode, pod_env, pod_layout, user_env
from tests.support.collection import often
from tests.support.memory import delete_pods
from tests.support.pods import END, Pods
from tests.support.preemption import TRAIN

STEPS = 30
GRACE = 60  # seconds


@pytest.fixture
def train(forked_pods: Callable[..., Pods], tmp_path: Path) -> Callable[..., Pods]:
    """Starts a job of several pods that trains with flk's library."""

    def start(steps: int = STEPS, *, count: int = 2, pause: float = 0.05, save: float = 0.0, **variables: str) -> Pods:
        settings = {"FLK_CHECKPOINT": str(tmp_path / "checkpoint"), "FLK_SAVE_EVERY": "1000", "FLK_GRACE": str(GRACE)}
        job = forked_pods(count, 1, script=TRAIN, FLK_RESTARTS="3", **settings | variables)
        job.start("train.py", str(steps), str(pause), str(save))
        return job

    return start


def reached(job: Pods, step: int) -> None:
    path = job.folder / "step.0"
    job.until(lambda: path.exists() and int(path.read_text() or 0) >= step, f"rank 0 reaches step {step}")


def saved_step(job: Pods, index: int) -> int:
    """The step that the termination message of a preempted pod names."""
    record = job.record(index)
    assert record.outcome == "preempted"
    assert record.failure is not None
    match = re.search(r"received SIGTERM; saved after step (\d+)$", record.failure.message)
    assert match, record.failure
    return int(match[1])


def checkpoints(job: Pods) -> list[str]:
    return sorted(path.name for path in (job.folder / "checkpoint").glob("step-*"))


def final_loss(job: Pods) -> str:
    (line,) = re.findall(r'\[rank 0\] (\{.*"final".*\})', job.log(0))
    return str(line)


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, str]:
    """Final loss of a job that nothing has stopped, by its number of pods."""
    return {}


@pytest.mark.promise("Recovery: On SIGTERM all ranks save after the same step")
@pytest.mark.xdist_group("undisturbed")
@pytest.mark.parametrize("victim", often((1,), [0, 1]))
def test_sigterm_to_one_pod_saves_on_all_ranks_and_no_step_is_lost(
    train: Callable[..., Pods], undisturbed: dict[int, str], victim: int
) -> None:
    if not undisturbed:
        job = train(pause=0, FLK_CHECKPOINT="")
        assert job.wait() == [0, 0], job.logs_of_all()
        undisturbed[2] = final_loss(job)
        (job.folder / "step.0").unlink()
    job = train()
    reached(job, 3)
    job.running[victim].terminate()
    assert job.running[victim].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    saved = saved_step(job, victim)
    assert checkpoints(job) == [f"step-{saved:09}"]
    job.start("train.py", str(STEPS), "0", "0", only=victim)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert f"[rank 1] begins at step {saved}\n" in job.log(1)
    failure = job.failure(attempt=0)
    assert failure.summary == f"test-worker-{victim} received SIGTERM; saved after step {saved}"
    assert f"[pod 0] all ranks stop after step {saved} to save\n" in job.logs_of_all()
    assert final_loss(job) == undisturbed[2]


@pytest.mark.promise("Recovery: On SIGTERM all ranks save after the same step")
def test_a_save_of_five_seconds_completes_on_sigterm_to_one_pod_of_four(train: Callable[..., Pods]) -> None:
    job = train(count=4, save=5.0, FLK_GRACE="30")
    reached(job, 3)
    job.running[2].terminate()
    job.until(lambda: (job.folder / "saving").exists(), "rank 0 saves")
    assert job.running[2].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    assert checkpoints(job) == [f"step-{saved_step(job, 2):09}"]
    assert [job.running[pod].poll() for pod in (0, 1, 3)] == [None] * 3  # they wait for pod 2


@pytest.mark.promise("Recovery: On SIGTERM all ranks save after the same step")
def test_sigterm_to_all_pods_twice_saves_once(train: Callable[..., Pods]) -> None:
    job = train(save=2.0)
    reached(job, 3)
    for process in job.running.values():
        process.terminate()
    job.until(lambda: (job.folder / "saving").exists(), "rank 0 saves")
    for process in job.running.values():
        process.terminate()  # as a kubelet that was restarted meanwhile
    assert job.wait() == [ExitCode.PREEMPTED] * 2, job.logs_of_all()
    assert checkpoints(job) == [f"step-{saved_step(job, 0):09}"]
    assert saved_step(job, 1) == saved_step(job, 0)


def test_a_step_that_takes_longer_than_the_grace_period_ends_without_a_save(train: Callable[..., Pods]) -> None:
    job = train(FLK_GRACE="5")  # less, and a busy machine may end it before the leader has a step
    reached(job, 2)  # so all ranks have made a step, and ended it when they took the next batch
    (job.folder / "evaluate").touch()
    job.until(lambda: (job.folder / "evaluating").exists(), "rank 0 evaluates")
    job.running[1].terminate()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    failure = job.failure(1)
    assert "not all ranks saved after step" in failure.message, job.logs_of_all()
    assert checkpoints(job) == []


def test_sigterm_before_the_rendezvous_ends_the_pod_at_once(train: Callable[..., Pods]) -> None:
    job = train(3)
    job.until(lambda: handles_sigterm(job.running[1].pid), "the launcher of pod 1 has begun")
    job.running[1].terminate()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED
    job.start("train.py", "3", "0", "0", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert [attempt.number for attempt in job.record(0).attempts][-1] <= 1


def handles_sigterm(pid: int) -> bool:
    (caught,) = re.findall(r"^SigCgt:\s+(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


AFTER_THE_END = """
    import pathlib, signal, sys, time
    import torch, torch.distributed as dist
    import flk_runtime as flk

    def save(number, frame):
        pathlib.Path(f"handled.{rank}").touch()
        sys.exit(0)

    def train(loop, model, optimizer):
        for _ in range(loop.steps, 3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            loop.step()
        loop.close()

    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if sys.argv[1] == "init":
        run = flk.init()
        rank = run.rank
        train(run, *run.parallelize(model, optimizer))
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        train(flk.adopt(model=model, optimizer=optimizer), model, optimizer)
    signal.signal(signal.SIGTERM, save)
    pathlib.Path(f"closed.{rank}").touch()
    time.sleep(600)  # as an evaluation that takes long
"""


@pytest.mark.parametrize("begin", often((0,), ["init", "adopt"]))
def test_after_the_end_of_a_training_the_script_hears_of_sigterm_itself(
    forked_pods: Callable[..., Pods], tmp_path: Path, begin: str
) -> None:
    variables = {"FLK_CHECKPOINT": str(tmp_path / "checkpoint"), "FLK_RESTARTS": "3", "FLK_GRACE": "30"}
    job = forked_pods(2, 1, script=AFTER_THE_END, **variables)
    job.start("train.py", begin)
    job.until(lambda: len(list(job.folder.glob("closed.*"))) == 2, "all ranks have closed their training")
    job.running[1].terminate()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    assert sorted(each.name for each in job.folder.glob("handled.*")) == ["handled.0", "handled.1"]
    failure = job.failure(1)
    assert (failure.kind, failure.pod, failure.message) == ("preempted", 1, "received SIGTERM")
    assert checkpoints(job) == ["step-000000003"]


OWN_LOOP = """
    import itertools, pathlib, sys, time
    import torch, torch.distributed as dist
    import flk_runtime as flk

    BEGIN
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    weight = model.module.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    begun = flk.restore(model=model, optimizer=optimizer)
    print(f"begins at step {begun} with {weight.max().item():g}")
    for step in itertools.count(begun + 1):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        torch.nn.init.constant_(weight, step)
        COUNTS
        if flk.must_stop(step):
            flk.save(step, wait=True, model=model, optimizer=optimizer)
            sys.exit(143)
        pathlib.Path(f"step.{rank}").write_text(str(step))
        if begun:
            break
        time.sleep(0.02)
    dist.barrier()
"""


@pytest.mark.parametrize("place", often((0,), ["memory", "storage"]))
@pytest.mark.parametrize(
    ("begin", "counts"),
    often(
        (2,),
        [('dist.init_process_group("gloo")', "pass"), ("flk.init()", "pass"), ("run = flk.init()", "run.step()")],
    ),
    ids=["gloo", "init", "run.step"],
)
def test_a_script_that_asks_whether_it_must_stop_saves_after_the_same_step_on_all_ranks(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path, begin: str, counts: str, place: str
) -> None:
    memory = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER}
    variables = memory if place == "memory" else {user_env.CHECKPOINT: str(tmp_path / "checkpoint")}
    script = OWN_LOOP.replace("BEGIN", begin).replace("COUNTS", counts)
    job = forked_pods(2, 1, script=script, FLK_RESTARTS="1", FLK_GRACE=str(GRACE), **variables)
    job.start("train.py")
    reached(job, 3)
    job.running[1].terminate()
    assert job.running[1].wait(END) == ExitCode.PREEMPTED, job.logs_of_all()
    saved = saved_step(job, 1)
    delete_pods(job, root, 1)
    job.start("train.py", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()
    assert [f"begins at step {saved} with {saved}\n" in job.log(pod) for pod in (0, 1)] == [True, True]
    failure = job.failure(attempt=0)
    assert failure.summary == f"test-worker-1 received SIGTERM; saved after step {saved}"
