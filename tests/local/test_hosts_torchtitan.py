"""torchtitan with flk, where it is installed: its debug model on the CPU resumes exactly after a killed rank."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchtitan_cpu
from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.pods import Pods

pytest.importorskip("torchtitan")
pytestmark = pytest.mark.soak

# In the first attempt rank 1 dies after the step in argv[1]. With 0 torchtitan trains without flk's adapter.
TRAIN = """
    import os, runpy, signal, sys

    sys.path.append(os.environ["BENCHMARKS"])
    import torchtitan_cpu

    torchtitan_cpu.replace_gpu()
    from torchtitan import trainer
    from torchtitan.components.metrics import MetricsProcessor

    dies, step = int(sys.argv.pop(1)), trainer.Trainer.train_step
    def train_step(self, *arguments):
        step(self, *arguments)
        if self.step == dies and os.environ["FLK_ATTEMPT"] == "0" and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    trainer.Trainer.train_step = train_step
    log = MetricsProcessor.log
    def logged(self, step, loss, *more, **named):
        print(f"step {step} has loss {loss!r}")
        log(self, step, loss, *more, **named)
    MetricsProcessor.log = logged
    runpy.run_module("flk_runtime.hosts.torchtitan" if dies else "torchtitan.train", run_name="__main__")
"""
STEPS = 5
MESHES = {
    "FSDP2": (2, ""),
    "FSDP2 x TP": (4, "--parallelism.tensor_parallel_degree 2"),
    "PP x FSDP2": (
        4,
        "--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B "
        "--training.local_batch_size 4 --training.disable_cuda_graphs",
    ),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_after_a_killed_rank_the_losses_are_those_of_the_undisturbed_training(
    forked_pods: Callable[..., Pods], root: Path, mesh: str
) -> None:
    processes, options = MESHES[mesh]
    losses = []
    for dies in (0, 3):
        variables: dict[str, Any] = {
            pod_env.MEMORY_ROOT: str(root),
            user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER,
            user_env.SAVE_EVERY: "1",
            pod_env.RESTARTS: "1",
            "BENCHMARKS": str(Path(torchtitan_cpu.__file__).parent),
            **torchtitan_cpu.VARIABLES,
        }
        job = forked_pods(1, processes, script=TRAIN, **variables)
        if not dies:
            torchtitan_cpu.assets(job.folder / "assets")
        job.start("train.py", str(dies), *torchtitan_cpu.arguments(Path("assets"), STEPS), *options.split())
        assert job.wait() == [0], job.log()
        losses.append(dict(re.findall(r"\[rank \d\] step (\d+) has loss (\d\S+)", job.log())))  # negative: no loss
    assert "resumed at step 2 from pod memory" in job.log()
    assert set(losses[0]) == {str(step) for step in range(1, STEPS + 1)}
    assert losses[0] == losses[1]
