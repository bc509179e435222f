"""The end of a script that has restored from memory what storage lacks, and saves nothing after: it is stored."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from tests.support.collection import often
from tests.support.pods import Pods
from tests.support.slow_storage import SLOW_STORAGE

# The first attempt saves in memory alone.
SCRIPT = """
    import os, sys, time
    os.environ["FLK_JOB"] = f"job of attempt {os.environ['FLK_ATTEMPT']}"
    import torch, torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    import flk_runtime as flk
    from flk_runtime.checkpoint.storage.folder import FolderDestination
    from flk_runtime.shared.progress import own_page
    from flk_runtime.training.process import current

    commit = FolderDestination.commit
    FolderDestination.commit = lambda *told: (print("stores step", told[1], *told[2].decode().split()), commit(*told))

    BEGIN
    rank, attempt = dist.get_rank(), os.environ["FLK_ATTEMPT"]
    model = fully_shard(torch.nn.Linear(64, 64))
    weight = model.weight.to_local()
    own = {"value": 0}
    step = flk.restore(RESTORED)
    MORE
    print(f"begins at step {step} with {weight.min().item()} {weight.max().item()}, {own['value']}")
    if not step:
        for step in (1, 2):
            with torch.no_grad():
                weight.fill_(step)
            own["value"] = 10 * step + rank
            flk.save(step, SAVED)
        end = time.monotonic() + 30
        while own_page().saved != 2 and time.monotonic() < end:
            for manager in current.managers:  # as must_stop does at each step
                manager.poll()
            time.sleep(0.02)
        dist.barrier()
        print(f"saved {own_page().saved}")
        ENDS
"""
EXITS = """
    import sys, torch
    import flk_runtime as flk

    model = torch.nn.Linear(4, 4)
    SAVES
    END
"""
SCRIPT_SAVES = 'torch.distributed.init_process_group("gloo"); flk.save(1, model=model)'

ALL = "model=model, own=flk.per_rank(own)"
GLOO = 'dist.init_process_group("gloo")'
WAITS = "time.sleep(600)"


def script(
    restored: str = ALL, *, saved: str = ALL, begin: str = GLOO, more: str = "", ends: str = "os._exit(1)"
) -> str:
    parts = {"RESTORED": restored, "SAVED": saved, "BEGIN": begin, "MORE": more, "ENDS": ends}
    return re.sub("|".join(parts), lambda match: parts[match[0]], SCRIPT)


@pytest.fixture
def start(forked_pods: Callable[..., Pods], root: Path, tmp_path: Path) -> Callable[..., Pods]:
    """Starts a job whose saves go to memory, and to storage only at the end."""

    def begin(text: str, pods: int, processes: int, *, only: int | None = None) -> Pods:
        settings = {pod_env.MEMORY_ROOT: str(root), user_env.STORE_EVERY: "0", pod_env.RESTARTS: "1"}
        settings |= {user_env.CHECKPOINT: str(tmp_path / "checkpoint"), pod_env.MIN_PODS: "1", user_env.LEASE: "10"}
        job = forked_pods(pods, processes, script=text, **settings)
        job.start("train.py", only=only)
        return job

    return begin


def stored(job: Pods) -> list[str]:
    return sorted(path.name for path in (job.folder / "checkpoint").glob("step-*"))


def begun(job: Pods, rank: int = 0, pod: int = 0) -> list[str]:
    return re.findall(rf"\[rank {rank}\] begins at step (\d+ with .*)", job.log(pod))


def ends(job: Pods, root: Path, expected: list[int]) -> None:
    """Wait for the end of a job, and take its memory."""
    assert job.wait() == expected, job.logs_of_all()
    assert stored(job) == ["step-000000002"], job.logs_of_all()
    for folder in root.glob("flk-*"):
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "text",
    often(
        (0,),
        [
            script(),
            script("model=model"),
            script(more="assert flk.restore(RESTORED) == step".replace("RESTORED", ALL)),
            script(begin='flk.init(device="cpu")'),
            script(more='other = flk.restore("elsewhere", model=model)'),
            script() + "    dist.destroy_process_group()\n",
        ],
    ),
    ids=["all", "a part", "twice", "init", "two places", "without a group"],
)
def test_what_was_restored_from_memory_is_stored_at_the_end(start: Callable[..., Pods], root: Path, text: str) -> None:
    job = start(text, 1, 2)
    ends(job, root, [0])
    (stores,) = re.findall("stores step 2 .*", job.log(0))
    assert "job of attempt 0" in stores
    assert begun(job)[1:] == ["2 with 2.0 2.0, " + ("0" if "restore(model=model)" in text else "20")]
    again = start(script(), 1, 2)
    assert again.wait() == [0], again.log()
    assert "resumed at step 2 from /" in again.log()
    assert [begun(again, rank)[-1] for rank in (0, 1)] == ["2 with 2.0 2.0, 20", "2 with 2.0 2.0, 21"]


@pytest.mark.parametrize(
    ("saves", "end", "code"),
    often(
        (2,),
        [
            (SCRIPT_SAVES, "sys.exit(3)", 3),
            (SCRIPT_SAVES, "sys.exit('something is wrong')", 1),
            ("run = flk.adopt(model=model)", "with run: run.step(); run.save(); sys.exit(3)", 3),
            ("run = flk.adopt(model=model)", "with run: run.step(); run.save(); sys.exit()", 0),
        ],
    ),
    ids=["code", "text", "in a training", "without a failure in a training"],
)
def test_the_exit_of_a_script_loses_no_checkpoint_that_is_being_written(
    forked_pods: Callable[..., Pods], tmp_path: Path, saves: str, end: str, code: int
) -> None:
    script = SLOW_STORAGE + textwrap.dedent(EXITS.replace("SAVES", saves).replace("END", end))
    job = forked_pods(1, 2, script=script, **{user_env.CHECKPOINT: str(tmp_path / "checkpoint")})
    job.start("train.py")
    assert job.wait() == [100 if code else 0], job.log()
    assert stored(job) == ["step-000000001"]
    failure = job.record().failure
    assert (failure.exit_code if failure else 0) == code


def test_fewer_ranks_store_the_shards_of_all(start: Callable[..., Pods], root: Path) -> None:
    job = start(script("model=model", saved="model=model", ends=WAITS), 2, 1)
    job.until(lambda: all("saved 2" in job.log(pod) for pod in (0, 1)), "all ranks have saved")
    job.running[1].kill()
    ends(job, root, [0, -9])
    again = start(script("model=model"), 1, 2)
    assert again.wait() == [0], again.log()
    assert [begun(again, rank)[-1] for rank in (0, 1)] == ["2 with 2.0 2.0, 0"] * 2
