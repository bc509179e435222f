"""torchtitan with flk, where it is installed: its debug model on the CPU goes on exactly after three faults."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchtitan_cpu
from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.memory import delete_pods
from tests.support.pods import Pods
from tests.support.processes import until

pytest.importorskip("torchtitan")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200, func_only=True)]

# With "disturbed", rank 1 dies in the first attempt, and all ranks wait in a step of the second and of the third, until
# a file says that they may go on. With "plain" torchtitan trains without flk's adapter.
TRAIN = """
    import os, pathlib, runpy, signal, sys, time

    sys.path.append(os.environ["BENCHMARKS"])
    import torchtitan_cpu

    torchtitan_cpu.replace_gpu()
    from torchtitan import trainer
    from torchtitan.components.metrics import MetricsProcessor

    disturbed, step = sys.argv.pop(1) == "disturbed", trainer.Trainer.train_step
    attempt, rank = os.environ["FLK_ATTEMPT"], os.environ["RANK"]
    def train_step(self, *arguments):
        step(self, *arguments)
        if not disturbed:
            return
        if (self.step, attempt, rank) == (3, "0", "1"):
            os.kill(os.getpid(), signal.SIGKILL)
        if (self.step, attempt) in ((4, "1"), (5, "2")):
            pathlib.Path(f"waits.{attempt}.{rank}").touch()
            while not pathlib.Path(f"go.{attempt}").exists():
                time.sleep(0.01)
    trainer.Trainer.train_step = train_step
    log = MetricsProcessor.log
    def logged(self, step, loss, *more, **named):
        print(f"step {step} has loss {loss!r}")
        log(self, step, loss, *more, **named)
    MetricsProcessor.log = logged
    runpy.run_module("flk_hosts.torchtitan" if disturbed else "torchtitan.train", run_name="__main__")
"""
STEPS = 7
END = 600  # seconds for an attempt of four ranks, whose imports take ten seconds of processor time each
# The number of ranks in each of two pods, and options of torchtitan.
MESHES = {
    "FSDP2": (1, ""),
    "FSDP2 x TP": (2, "--parallelism.tensor_parallel_degree 2"),
    "PP x FSDP2": (
        2,
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B "
        "--training.local_batch_size 4 --training.disable_cuda_graphs",
    ),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_after_a_killed_rank_a_deleted_and_a_preempted_pod_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path, mesh: str
) -> None:
    processes, options = MESHES[mesh]
    losses = []
    for disturbed in (False, True):
        variables: dict[str, Any] = {
            pod_env.MEMORY_ROOT: str(root),
            user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER,
            user_env.SAVE_EVERY: "1",
            user_env.LEASE: "10",
            pod_env.RESTARTS: "1",
            pod_env.GRACE: "60",
            "BENCHMARKS": str(Path(torchtitan_cpu.__file__).parent),
            **torchtitan_cpu.VARIABLES,
        }
        job = forked_pods(2, processes, script=TRAIN, **variables)
        if not disturbed:
            torchtitan_cpu.assets(job.folder / "assets")
        arguments = [*torchtitan_cpu.arguments(Path("assets"), STEPS), *options.split()]
        command = ("train.py", "disturbed" if disturbed else "plain", *arguments)
        job.start(*command)
        if disturbed:
            _disturb(job, root, 2 * processes, command)
        assert [job.running[pod].wait(END) for pod in (0, 1)] == [0, 0], job.logs_of_all()
        losses.append(dict(re.findall(r"\[rank \d\] step (\d+) has loss (\d\S+)", job.logs_of_all())))  # negative: none
    assert re.findall(r"resumed at step (\d) from pod memory", job.log(0)) == ["2", "3", "5"]
    assert set(losses[0]) == {str(step) for step in range(1, STEPS + 1)}
    assert losses[0] == losses[1]


def _disturb(job: Pods, root: Path, ranks: int, command: tuple[str, ...]) -> None:
    """Delete pod 1 in the second attempt, and stop it with its grace in the third one."""

    def wait_for(attempt: int) -> None:
        waiting = [job.folder / f"waits.{attempt}.{rank}" for rank in range(ranks)]
        until(
            lambda: all(each.exists() for each in waiting), f"all ranks wait: {attempt}", END, context=job.logs_of_all
        )

    wait_for(1)
    delete_pods(job, root, 1)
    job.start(*command, only=1)
    wait_for(2)
    job.running[1].terminate()
    job.until(lambda: "received SIGTERM" in job.log(0), "the leader has heard of it")
    (job.folder / "go.2").touch()
    assert job.running[1].wait(END) == 143, job.logs_of_all()
    delete_pods(job, root, 1)
    job.start(*command, only=1)
