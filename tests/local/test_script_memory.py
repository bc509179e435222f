"""flk.save and flk.restore with checkpoints in the memory of pods: scripts with a loop of their own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.collection import often
from tests.support.memory import GLOO, SAVES_TWICE, delete_pods, own_loop
from tests.support.pods import Pods

SAVES_ONCE = """
        save(1, 1.0)
        end = time.monotonic() + 30
        while own_page().saved != 1 and time.monotonic() < end:
            flk.must_stop(1)
            time.sleep(0.02)
        print(f"saved {own_page().saved}")
"""
SAVES_WITHOUT_A_PART = """
        save(1, 1.0, wait=True)
        if dist.get_rank() == 1:
            from flk_runtime.checkpoint.memory import PodMemory
            PodMemory.finish = lambda memory, save, path: memory.skip("there is no room")
        save(2, 2.0)
        save(3, 3.0)
"""

GOES_BACK = """
    import torch
    import flk_runtime as flk

    model = torch.nn.Linear(1, 1)
    flk.save(1, model=model, wait=True)
    try:
        flk.restore(model=model)
    except (flk.SetupError, flk.CheckpointError) as error:
        print(error)
"""


def begun(job: Pods) -> list[list[str]]:
    """Step and values with which each rank's latest attempt began, by pod."""
    return [re.findall(r"begins at step (\d+ with .*)", job.log(pod)) for pod in job.running]


def places(root: Path) -> dict[str, str]:
    """The variables that say where checkpoints are."""
    return {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER}


def start(forked_pods: Callable[..., Pods], root: Path, script: str) -> Pods:
    """Start two pods of one rank, which save and then wait."""
    job = forked_pods(2, 1, script=script, **places(root), **{pod_env.RESTARTS: "1", user_env.LEASE: "10"})
    job.start("train.py")
    job.until(lambda: len([*job.folder.glob("saved.*")]) == 2, "all ranks have saved")
    return job


def lose_pod(job: Pods, root: Path, pod: int = 1) -> None:
    delete_pods(job, root, pod)
    job.start("train.py", only=pod)
    assert job.wait() == [0, 0], job.logs_of_all()


@pytest.mark.parametrize("begin", often((0,), [GLOO, "flk.init()"]))
def test_the_launcher_hears_that_a_checkpoint_is_complete(
    forked_pods: Callable[..., Pods], root: Path, begin: str
) -> None:
    """At a step after it has become so."""
    job = start(forked_pods, root, own_loop(SAVES_ONCE, begin))
    lose_pod(job, root)
    assert "[rank 0] saved 1" in job.log(0)
    assert "flk: resumed at step 1 from pod memory" in job.log(0)
    assert [ends[-1] for ends in begun(job)] == ["1 with 1.0 1.0"] * 2


@pytest.mark.promise("Checkpoints: What is restored is whole and of one save")
def test_saves_after_the_same_step_are_not_mixed(forked_pods: Callable[..., Pods], root: Path) -> None:
    """The shard of the lost pod is as new as that of the other one."""
    job = start(forked_pods, root, own_loop(SAVES_TWICE))
    lose_pod(job, root)
    assert [ends[-1] for ends in begun(job)] == ["1 with 3.0 3.0"] * 2


@pytest.mark.promise("Checkpoints: What is restored is whole and of one save")
@pytest.mark.parametrize("pod", often((0,), [0, 1]))
def test_the_last_whole_checkpoint_stays_while_later_ones_lack_a_shard(
    forked_pods: Callable[..., Pods], root: Path, pod: int
) -> None:
    """The ranks agree at each save on whether the one before is whole, and only then write over an older one.

    Their launchers tell the partner, which needs that when pod 0 is lost.
    """
    job = start(forked_pods, root, own_loop(SAVES_WITHOUT_A_PART))
    lost = "the checkpoint after step 2 is not in memory: there is no room; training goes on"
    job.until(lambda: lost in job.log(1), "rank 1 says what is lost")  # before its launcher is, and with it the line
    lose_pod(job, root, pod)
    assert [ends[-1] for ends in begun(job)] == ["1 with 1.0 1.0"] * 2


def test_a_script_that_goes_back_without_storage_is_told_why_it_cannot(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    places = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER}
    job = forked_pods(script=GOES_BACK, **places)
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert "[rank 0] flk.restore cannot go back to a checkpoint that this attempt has saved in the memory" in job.log()
