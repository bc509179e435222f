"""The end of a script that has restored from memory what storage lacks, and saves nothing after: it is stored."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
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

BESIDE = """
    import os, time, torch, flk_runtime as flk
    from flk_runtime.shared.progress import own_page

    torch.distributed.init_process_group("gloo")
    model = torch.nn.Linear(4, 4)
    found = flk.restore(model=model)
    print("found", found)
    if found:
        flk.init(device="cpu", checkpoint="elsewhere")
    if found < 2:
        flk.save(found + 1, model=model)
        end = time.monotonic() + 30
        while own_page().saved != found + 1 and time.monotonic() < end:
            time.sleep(0.02)
        os._exit(found + 1)
"""
RUN = """
    import os, time, torch, flk_runtime as flk
    from flk_runtime.shared.progress import own_page

    model = torch.nn.Linear(4, 4)
    torch.distributed.init_process_group("gloo")
    found = flk.restore(model=torch.nn.Linear(4, 4))
    with flk.init(device="cpu", log_every=0) as run:
        model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=1.0))
        print(f"{found} steps of {run.steps}")
        while run.steps < 5:
            run.step()
            end = time.monotonic() + 30
            while run.steps == 3 and own_page().saved != 3 and time.monotonic() < end:
                time.sleep(0.02)
            if run.steps == 3 and os.environ["FLK_ATTEMPT"] == "0":
                os._exit(1)
"""
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
        settings |= {user_env.CHECKPOINT: str(tmp_path / "checkpoint"), pod_env.MIN_PODS: "1", user_env.LEASE: "3"}
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
    [
        script(),
        script("model=model"),
        script(more="assert flk.restore(RESTORED) == step".replace("RESTORED", ALL)),
        script(begin='flk.init(device="cpu")'),
        script(more='other = flk.restore("elsewhere", model=model)'),
        script() + "    dist.destroy_process_group()\n",
    ],
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
    [
        (SCRIPT_SAVES, "sys.exit(3)", 3),
        (SCRIPT_SAVES, "sys.exit('something is wrong')", 1),
        ("run = flk.adopt(model=model)", "with run: run.step(); run.save(); sys.exit(3)", 3),
        ("run = flk.adopt(model=model)", "with run: run.step(); run.save(); sys.exit()", 0),
    ],
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


def test_a_rank_that_fails_by_its_exit_code_waits_for_no_other(start: Callable[..., Pods], root: Path) -> None:
    job = start(script(ends="rank and sys.exit(3); time.sleep(600)"), 1, 2)
    ends(job, root, [0])
    (failed, ended) = job.record().attempts
    assert failed.failure is not None
    assert (failed.failure.exit_code, ended.failure) == (3, None)


def test_a_run_in_the_place_from_which_flk_has_restored_keeps_its_checkpoints_in_memory(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path
) -> None:
    settings = {
        pod_env.MEMORY_ROOT: str(root),
        user_env.STORE_EVERY: "0",
        user_env.SAVE_EVERY: "1",
        "FLK_RESTARTS": "1",
    }
    job = forked_pods(script=RUN, **settings, **{user_env.CHECKPOINT: str(tmp_path / "checkpoint")})
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert re.findall(r"(\d+) steps of (\d+)", job.log()) == [("0", "0"), ("3", "3")]
    assert "keeps only the first training" not in job.log()


def test_the_memory_stays_with_the_place_from_which_flk_has_restored(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    settings = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER, "FLK_RESTARTS": "2"}
    job = forked_pods(script=BESIDE, **settings)
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert re.findall(r"found (\d)", job.log()) == ["0", "1", "2"]


def test_fewer_ranks_store_the_shards_of_all(start: Callable[..., Pods], root: Path) -> None:
    job = start(script("model=model", saved="model=model", ends=WAITS), 2, 1)
    job.until(lambda: all("saved 2" in job.log(pod) for pod in (0, 1)), "all ranks have saved")
    job.running[1].kill()
    ends(job, root, [0, -9])
    again = start(script("model=model"), 1, 2)
    assert again.wait() == [0], again.log()
    assert [begun(again, rank)[-1] for rank in (0, 1)] == ["2 with 2.0 2.0, 0"] * 2


def test_more_ranks_store_the_shards_of_all(start: Callable[..., Pods], root: Path) -> None:
    job = start(script("model=model", saved="model=model", ends=WAITS), 2, 1, only=0)
    job.until(lambda: "saved 2" in job.log(0), "rank 0 has saved")
    job.start("train.py", only=1)
    ends(job, root, [0, 0])
    again = start(script("model=model"), 1, 2)
    assert again.wait() == [0], again.log()
    assert [begun(again, rank)[-1] for rank in (0, 1)] == ["2 with 2.0 2.0, 0"] * 2
