"""flk.save and flk.restore with checkpoints in the memory of pods: scripts with a loop of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime import contract
from tests.support.memory import delete_pods
from tests.support.pods import Pods

BEGIN = """
    import os, pathlib, signal, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    import flk_runtime as flk
    from flk_runtime.system.progress import own_page

    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    step = flk.restore(model=model)
    weight = model.module.weight
    print("begins at step", step, "with", float(weight.min()), float(weight.max()) if step else "nothing")

    def save(step, value, **options):
        with torch.no_grad():
            weight.fill_(value)
        flk.save(step, model=model, **options)
"""
END = """
        dist.barrier()
        pathlib.Path(f"saved.{dist.get_rank()}").touch()
        time.sleep(60)
    dist.barrier()
"""
SAVED = (
    BEGIN
    + """
    if not step:
        save(1, 1.0)
        end = time.monotonic() + 30
        while own_page().saved != 1 and time.monotonic() < end:
            time.sleep(0.02)
        print(f"saved {own_page().saved}")
"""
    + END
)
TWICE = (
    BEGIN
    + """
    if not step:
        for value in (1.0, 2.0, 3.0):
            save(1, value, wait=True)
"""
    + END
)
OTHER_PLACE = (
    BEGIN
    + """
    if not step:
        for step in (1, 2):
            save(step, float(step), wait=True, checkpoint=os.environ["FLK_CHECKPOINT"] + "/")
            save(step + 10, -1.0, wait=True, checkpoint=os.path.abspath("best"))
"""
    + END
)


def begun(job: Pods) -> list[list[str]]:
    """Step and values with which each rank's latest attempt began, by pod."""
    return [re.findall(r"begins at step (\d+ with .*)", job.log(pod)) for pod in job.running]


def start(forked_pods: Callable[..., Pods], root: Path, script: str) -> Pods:
    """Start two pods of one rank, which save and then wait."""
    places = {contract.MEMORY_ROOT: str(root), contract.CHECKPOINT: contract.CHECKPOINT_FOLDER}
    job = forked_pods(2, 1, script=script, **places, **{contract.RESTARTS: "1", contract.LEASE: "3"})
    job.start("train.py")
    job.until(lambda: len([*job.folder.glob("saved.*")]) == 2, "all ranks have saved")
    return job


def lose_pod(job: Pods, root: Path) -> None:
    delete_pods(job, root, 1)
    job.start("train.py", only=1)
    assert job.wait() == [0, 0], job.logs_of_all()


@pytest.mark.parametrize("begin", ['dist.init_process_group("gloo")', "flk.init()"])
def test_the_launcher_hears_that_a_checkpoint_is_complete(
    forked_pods: Callable[..., Pods], root: Path, begin: str
) -> None:
    """The script calls nothing of flk meanwhile."""
    job = start(forked_pods, root, SAVED.replace('dist.init_process_group("gloo")', begin))
    lose_pod(job, root)
    assert "[rank 0] saved 1" in job.log(0)
    assert "flk: resumed at step 1 from the memory of the pods" in job.log(0)
    assert [ends[-1] for ends in begun(job)] == ["1 with 1.0 1.0"] * 2


def test_saves_after_the_same_step_are_not_mixed(forked_pods: Callable[..., Pods], root: Path) -> None:
    """The part of the lost pod is as new as that of the other one."""
    job = start(forked_pods, root, TWICE)
    lose_pod(job, root)
    assert [ends[-1] for ends in begun(job)] == ["1 with 3.0 3.0"] * 2


def test_checkpoints_in_another_place_are_not_in_memory(forked_pods: Callable[..., Pods], root: Path) -> None:
    """The memory is for the job's checkpoints, not for the best model that a script keeps elsewhere."""
    job = start(forked_pods, root, OTHER_PLACE)
    lose_pod(job, root)
    assert [ends[-1] for ends in begun(job)] == ["2 with 2.0 2.0"] * 2
    assert (job.folder / "best" / "latest").read_text().strip() == "step-000000012"
