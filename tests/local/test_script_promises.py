"""flk.save and flk.restore keep what flk promises for a run: options, phases, and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, pod_layout, user_env
from tests.support.collection import often
from tests.support.pods import Pods
from tests.support.ranks import Ranks

# What waits for storage says in which phase the rank is then. A write begins when somebody waits for it.
PHASES = """
    import contextlib, json, os, torch, torch.distributed as dist
    import flk_runtime as flk
    from flk_runtime.checkpoint.save import background
    from flk_runtime.checkpoint.storage.folder import FolderDestination
    from flk_runtime.shared.progress import Phase, own_page

    def tell(name):
        function = getattr(FolderDestination, name)
        def told(self, *arguments):
            print("=", name, Phase(own_page().phase).name, flush=True)
            return function(self, *arguments)
        setattr(FolderDestination, name, told)

    background._PAUSE = 1e9
    for name in ("prepare", "create", "measure"):
        tell(name)
    torch.manual_seed(0)
    BODY
    print("= trains", Phase(own_page().phase).name)
"""
SCRIPT = """model = torch.nn.Linear(2, 2)
    step = flk.restore(model=model)
    flk.save(step + 1, model=model, wait=True)
    flk.save(step + 2, model=model)
"""
RUN = """run = flk.init(device="cpu", save_every=0)
    model = run.parallelize(torch.nn.Linear(2, 2))
    run.step()
    run.save(wait=True)
    run.step()
    run.close()
"""
LOOP = """model = torch.nn.Linear(2, 2)
    with flk.adopt(model=model, save_every=0) as loop:
        loop.step()
        loop.save(wait=True)
        loop.step()
"""


@pytest.mark.parametrize(
    ("body", "trains"),
    often((0,), [(SCRIPT, "STARTING"), (RUN, "TRAINING"), (LOOP, "TRAINING")]),
    ids=["script", "run", "loop"],
)
def test_a_rank_that_waits_for_storage_is_in_the_phase_of_saves_or_restores(
    ranks: Ranks, tmp_path: Path, body: str, trains: str
) -> None:
    """Else a slow storage would be a hang with the limit of a step."""
    for measured in ([], ["measure RESTORING"] * 2):  # a file of one rank, and the metadata
        (result,) = ranks(PHASES.replace("BODY", body), 1, {"FLK_CHECKPOINT": str(tmp_path / "checkpoints")})
        told = [line[2:] for line in result.lines if line.startswith("= ")]
        writes = ["create SAVING"] * 6  # twice a file of the rank, the metadata, and the manifest
        assert sorted(told) == sorted(["prepare RESTORING", *measured, *writes, f"trains {trains}"])


# Says how many of a process use the memory of the pods.
ONE_TRAINING = """
    import os, torch
    import flk_runtime as flk
    from flk_runtime.checkpoint.memory import PodMemory

    reserve, users = PodMemory.reserve, []
    def counted(memory, *arguments, **named):
        users.append(memory)
        return reserve(memory, *arguments, **named)
    PodMemory.reserve = counted

    own = {"value": 0}
    def trains():
        with flk.init(device="cpu", checkpoint="other", save_every=1) as run:
            model = run.parallelize(torch.nn.Linear(1, 1))
            for _ in range(2):
                run.step()
    BODY
    print("used by", len(set(map(id, users))))
"""


@pytest.mark.parametrize(
    ("body", "users", "said"),
    often(
        (1,),
        [
            ("flk.save(1, own=own), trains(), flk.save(2, own=own)", 1, 1),
            ("flk.save(1, own=own), trains(), flk.restore(own=own), flk.save(2, own=own)", 2, 1),
            ("flk.restore(own=own), trains(), flk.save(1, own=own)", 1, 1),
            ("flk.save(1, own=own), flk.save(2, os.environ['FLK_CHECKPOINT'] + '/', own=own)", 1, 0),
        ],
    ),
    ids=["script", "script that goes back", "script that begins", "one place with two names"],
)
def test_the_memory_of_the_pods_holds_the_first_training_of_a_process(
    forked_pods: Callable[..., Pods], root: Path, tmp_path: Path, body: str, users: int, said: int
) -> None:
    """Two trainings would write in turn into the same two files. One that goes back uses them again."""
    settings = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: str(tmp_path / "checkpoints")}
    job = forked_pods(script=ONE_TRAINING.replace("BODY", body), **settings)
    job.start("train.py")
    assert job.wait() == [0], job.log()
    assert f"used by {users}" in job.log()
    assert job.log().count("the memory of the pods keeps only the first training of a process") == said


UNSAVED = """
    import os, torch
    import flk_runtime as flk
    from flk_runtime.checkpoint.storage import restore
    from flk_runtime.contract import pod_layout

    restore._SEEN_LIMIT = 0.0
    rank = os.environ["RANK"]
    if os.environ["FLK_CHECKPOINT"] == "of-the-pod":
        pod_layout.CHECKPOINT_FOLDER = "of-the-pod"
        os.mkdir(f"pod-{rank}"), os.chdir(f"pod-{rank}")
    BODY
    for wait in (False, True, True):
        try:
            save(wait)
            print("goes on")
        except (flk.SetupError, flk.CheckpointError) as error:
            print(type(error).__name__, error)
"""
SCRIPT_SAVES = """torch.distributed.init_process_group("gloo")
    own = {"numbers": torch.zeros(1000)}
    save = lambda wait: flk.save(1, own=own, wait=wait)
"""
RUN_SAVES = """run = flk.init(device="cpu", save_every=0)
    model = run.parallelize(torch.nn.Linear(100, 100))
    save = lambda wait: run.save(wait=wait)
"""


@pytest.mark.parametrize("body", often((0,), [SCRIPT_SAVES, RUN_SAVES]), ids=["script", "run"])
def test_a_save_that_has_to_be_complete_is_an_error_where_nothing_is_saved(
    forked_pods: Callable[..., Pods], root: Path, body: str
) -> None:
    for place, memory, said, error in (
        ("of-the-pod", "0", "no checkpoints, since the pods share no volume", "SetupError no checkpoints, since the"),
        (pod_layout.CHECKPOINT_FOLDER, "1000", "and nothing is saved", "StorageError nothing is saved: no room for"),
    ):
        settings = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: place, user_env.MEMORY_LIMIT: memory}
        job = forked_pods(1, 2, script=UNSAVED.replace("BODY", body), **settings)
        job.start("train.py")
        assert job.wait() == [0], job.log()
        for rank in (0, 1):
            lines = [line for line in job.log().splitlines() if line.startswith(f"[rank {rank}]")]
            assert [line for line in lines if "goes on" in line] == [f"[rank {rank}] goes on"]
            assert sum(f"[rank {rank}] {error}" in line for line in lines) == 2, job.log()
        assert job.log().count(f"flk: {said}") + job.log().count(f", {said}") == 1, job.log()


def test_a_shard_that_one_pod_has_no_room_for_is_an_error_of_all_ranks(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    body = (
        SCRIPT_SAVES
        + """    if rank == "1":
        from flk_runtime.checkpoint.memory import PodMemory
        PodMemory.finish = lambda memory, save, path: memory.skip("there is no room")
    """
    )
    settings = {pod_env.MEMORY_ROOT: str(root), user_env.CHECKPOINT: pod_layout.CHECKPOINT_FOLDER}
    job = forked_pods(1, 2, script=UNSAVED.replace("BODY", body), **settings)
    job.start("train.py")
    assert job.wait() == [0], job.log()
    expected = "StorageError the checkpoint after step 1 is not in memory: there is no room\n"
    assert [job.log().count(f"[rank {rank}] {expected}") for rank in (0, 1)] == [2, 2], job.log()
