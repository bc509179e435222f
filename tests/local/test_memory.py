"""Checkpoints in memory, with real launchers of several pods on this machine."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.shared.shard_file import DATA_BEGIN, ShardError, read_preamble
from tests.support import preemption
from tests.support.collection import often
from tests.support.memory import TRAIN, delete_pods, folder_of
from tests.support.pods import Pods

SIZE = 1 << 20


@pytest.fixture
def job(forked_pods: Callable[..., Pods], root: Path) -> Callable[..., Pods]:
    def make(count: int, processes: int = 1, **variables: str) -> Pods:
        settings = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "3", user_env.LEASE: "10", **variables}
        return forked_pods(count, processes, script=TRAIN, **settings)

    return make


def begun(job: Pods, attempt_lines: str = "begins at step ") -> list[int]:
    """The steps after which rank 0 began, in the order of the attempts."""
    return [int(text) for text in re.findall(rf"\[rank 0\] {attempt_lines}(\d+)", job.log(0))]


def reach(job: Pods, step: int) -> None:
    """Wait until all ranks have done a step."""
    ranks = range(int(job.variables[pod_env.PODS]) * int(job.variables[pod_env.PROCESSES]))

    def done() -> bool:
        texts = [path.read_text() for rank in ranks if (path := job.folder / f"step.{rank}").exists()]
        return len(texts) == len(ranks) and all(int(text or 0) >= step for text in texts)

    job.until(done, f"all ranks do step {step}")


def least_restored(step: int) -> int:
    """The step of the oldest checkpoint, of one every 5 steps, that may be restored after ``step`` was made.

    The last save before this step has waited until all pods held the checkpoint before it. The save of this step may
    still wait.
    """
    return (step - 1) // 5 * 5 - 5


def reach_save(job: Pods, step: int, save_every: int = 5) -> None:
    """Wait until this pod and its partner hold the checkpoint after a step: ranks ask before they save the next one."""
    reach(job, step + save_every + 1)


def start(job: Pods, steps: int, save_every: int = 5, pause: float = 0.02, size: int = SIZE) -> None:
    job.start("train.py", str(steps), str(save_every), str(pause), str(size))


@pytest.mark.promise("Checkpoints: A pod that is lost restores from the memory of its partner")
def test_a_killed_rank_restores_from_its_own_pod(job: Callable[..., Pods], root: Path) -> None:
    run = job(2, 2)
    start(run, 60)
    reach_save(run, 10)
    os.kill(run.pid(0, 3), signal.SIGKILL)
    assert run.wait() == [0, 0], run.logs_of_all()
    first, second = begun(run)
    assert first == 0
    assert second >= 10, run.logs_of_all()
    assert "no rank has saved" not in run.log(0)
    last = run.record().attempts[-1]
    assert (last.restored, last.restored_from) == (second, "memory")
    lost = run.record().attempts[-2].step
    assert lost is not None
    assert least_restored(lost) <= second <= lost
    assert list(root.iterdir()) == [], "the launchers remove their files at the end"


def restart(job: Pods, steps: int, *pods: int, save_every: int = 5, pause: float = 0.02, size: int = SIZE) -> None:
    for pod in pods:
        job.start("train.py", str(steps), str(save_every), str(pause), str(size), only=pod)


@pytest.mark.promise("Checkpoints: A pod that is lost restores from the memory of its partner")
@pytest.mark.parametrize("victim", often((0,), [0, 2]))
def test_a_deleted_pod_restores_from_its_partner(job: Callable[..., Pods], root: Path, victim: int) -> None:
    run = job(3)
    start(run, 80)
    reach_save(run, 10)
    delete_pods(run, root, victim)
    for path in run.folder.glob("step.*"):  # of the first attempt
        path.unlink()
    restart(run, 80, victim)
    reach_save(run, 30)
    # Another one: the copies that the first pod held have been made anew.
    delete_pods(run, root, (victim + 1) % 3)
    restart(run, 80, (victim + 1) % 3)
    assert run.wait() == [0, 0, 0], run.logs_of_all()
    steps = begun(run)
    assert len(steps) == 3
    assert steps[1] >= 10
    assert steps[2] >= 30
    attempts = run.record().attempts
    # The leader may have heard of fewer steps than were saved.
    restored = [
        (least_restored(before.step or 0), after.restored or 0) for before, after in itertools.pairwise(attempts)
    ]
    assert all(least <= found for least, found in restored), attempts


@pytest.mark.promise("Checkpoints: A damaged checkpoint is reported, and the one before it is used")
def test_a_checkpoint_that_cannot_be_read_gives_way_to_the_one_before(job: Callable[..., Pods], root: Path) -> None:
    run = job(3, **{user_env.BACKOFF: "0"})
    start(run, 30, save_every=10, pause=0.1)
    run.until(lambda: sorted(rank for step, rank, _ in held(root) if step == 20) == [0, 0, 1, 1, 2, 2], "20 is copied")
    delete_pods(run, root, 1)
    (only,) = [path for step, rank, path in held(root) if (step, rank) == (20, 1)]
    with open(only, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[DATA_BEGIN] ^= 1
    restart(run, 30, 1, save_every=10)
    assert run.wait() == [0, 0, 0], run.logs_of_all()
    assert begun(run) == [0, 20, 10], run.logs_of_all()
    assert "the checkpoint in memory after step 20 could not be read: step 10 is restored" in run.log(0)


def held(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Step and rank of each whole shard in the memory of the pods, and its file."""
    for path in root.glob("*/*.shard"):
        with contextlib.suppress(ShardError, FileNotFoundError):
            preamble = read_preamble(path.read_bytes())
            yield preamble.step, preamble.rank, path


def test_partners_that_are_lost_together_start_the_training_again(job: Callable[..., Pods], root: Path) -> None:
    run = job(3)
    start(run, 60)
    reach(run, 12)
    delete_pods(run, root, 1, 2)
    restart(run, 60, 1, 2)
    assert run.wait() == [0, 0, 0], run.logs_of_all()
    assert begun(run) == [0, 0]
    assert re.search(
        r"\[pod 0\] the checkpoint in memory after step \d+ is incomplete: [12] of its 3 shards are lost",
        run.log(0),
    ), run.log(0)


@pytest.mark.promise("Recovery: Launchers that all die go on with the attempts of the job")
def test_a_killed_launcher_finds_the_shards_of_its_pod_again(job: Callable[..., Pods], root: Path) -> None:
    run = job(1, 2)
    start(run, 60)
    reach_save(run, 10)
    run.running[0].kill()
    run.running[0].wait()
    restart(run, 60, 0)
    assert run.wait() == [0], run.logs_of_all()
    assert begun(run)[1] >= 10


@pytest.mark.promise("Checkpoints: A pod that is lost restores from the memory of its partner")
def test_a_pod_that_has_to_stop_saves_and_copies_before_it_ends(job: Callable[..., Pods], root: Path) -> None:
    run = job(2, **{pod_env.GRACE: "20"})
    start(run, 60, save_every=1000, size=16 << 20)
    reach(run, 12)
    run.running[1].send_signal(signal.SIGTERM)
    assert run.running[1].wait(60) == 143, run.logs_of_all()
    shutil.rmtree(folder_of(root, 1))
    restart(run, 60, 1, save_every=1000, size=16 << 20)
    assert run.wait() == [0, 0], run.logs_of_all()
    _, second = begun(run)
    assert second >= 12, run.logs_of_all()
    stopped = run.record().attempts[-2]
    assert stopped.step == second, "no step is lost"


NO_ROOM = """
    import pathlib, time, torch, flk_runtime as flk

    run = flk.init(device="cpu", save_every=2, log_every=0)
    run.parallelize(torch.nn.Linear(512, 512))
    while True:
        run.step()
        pathlib.Path(f"step.{run.rank}").write_text(str(run.steps))
        if run.steps == 8:
            print("copies:", pathlib.Path("/proc/self/maps").read_text().count("flk-shard"))
        time.sleep(0.02)
"""


def test_a_run_whose_checkpoints_have_no_room_does_not_say_that_it_saves(
    forked_pods: Callable[..., Pods], root: Path
) -> None:
    limits = {user_env.MEMORY_LIMIT: "1Mi", pod_env.GRACE: "20", user_env.LEASE: "10"}
    run = forked_pods(2, 1, script=NO_ROOM, **{pod_env.MEMORY_ROOT: str(root)}, **limits)
    run.start("train.py")
    reach(run, 10)
    run.running[1].send_signal(signal.SIGTERM)
    run.running[1].wait(60)
    log = run.logs_of_all()
    assert log.count("nothing is saved, since there is no storage for checkpoints") == 1, log
    assert "[rank 1] copies: 0" in log
    assert "all ranks get SIGTERM, since not every rank has made a step after which flk could save" in log
    assert "which is saved" not in log


@pytest.mark.parametrize(("processes", "strategy"), often((1,), [(1, "ddp"), (2, "full_shard")]))
def test_a_training_without_a_folder_ends_with_the_same_loss_to_the_bit(
    forked_pods: Callable[..., Pods], root: Path, processes: int, strategy: str
) -> None:
    variables = {pod_env.MEMORY_ROOT: str(root), pod_env.RESTARTS: "3", user_env.LEASE: "10", user_env.SAVE_EVERY: "5"}
    variables[user_env.STRATEGY] = strategy
    quiet = forked_pods(2, processes, script=preemption.TRAIN, **variables)
    quiet.start("train.py", "30", "0", "0")
    assert quiet.wait() == [0, 0], quiet.logs_of_all()
    (expected,) = re.findall(r"final\D+([0-9.e-]+)", quiet.log(0))
    for path in [*quiet.folder.glob("step.*"), *quiet.folder.glob("log.*")]:
        path.unlink()
    run = forked_pods(2, processes, script=preemption.TRAIN, **variables)
    run.start("train.py", "30", "0.05", "0")
    reach_save(run, 10)
    delete_pods(run, root, 1)
    run.start("train.py", "30", "0.05", "0", only=1)
    assert run.wait() == [0, 0], run.logs_of_all()
    assert re.search("flk: resumed at step [12][0-9] from pod memory", run.log(0)), run.log(0)
    last = run.record().attempts[-1]
    assert last.restored_from == "memory"
    assert re.findall(r"final\D+([0-9.e-]+)", run.log(0)) == [expected]


@pytest.mark.promise("Checkpoints: What is restored is whole and of one save")
@pytest.mark.parametrize("kills", [8, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_kills_at_random_moments_of_saves_leave_a_whole_state(job: Callable[..., Pods], root: Path, kills: int) -> None:
    """Ranks are killed while they save in every step. The script asserts that no state is mixed when it restores."""
    generator = random.Random(kills)
    limits = {pod_env.RESTARTS: "1000", user_env.BACKOFF: "0", user_env.RETRY_SAME_FAILURE: "1"}
    run = job(2, 1, **limits)
    start(run, 1_000_000, save_every=1, pause=0.0, size=8 << 20)
    reach_save(run, 1, save_every=1)  # on a busy machine no later attempt may get so far
    for attempt in range(kills):
        pid = run.pid(attempt, generator.randrange(2))
        time.sleep(generator.random() * 0.3)
        os.kill(pid, signal.SIGKILL)
    run.pid(kills, 0)
    steps = begun(run)
    assert len(steps) == kills + 1
    assert all(later >= earlier for earlier, later in itertools.pairwise(steps)), steps
    assert steps[-1] > 0
    assert "AssertionError" not in run.logs_of_all()


# It notes the bits of its state after each step, in a file of each attempt.
TRAINS = """
    import hashlib, os, pathlib, torch, flk_runtime as flk

    data = torch.utils.data.TensorDataset(torch.randn(512, 64, generator=torch.Generator().manual_seed(1)))
    run = flk.init(device="cpu", save_every=1, log_every=0, seed=1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.BatchNorm1d(1024), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 64)
    )
    model, optimizer = run.parallelize(model, torch.optim.AdamW(model.parameters()))
    loader = run.loader(data, 8, shuffle=True)
    states = open(f"states.{run.attempt}.{run.rank}", "w")

    def note():
        averages = [optimizer.state.get(each, {}) for each in model.parameters()]
        values = [*model.parameters(), *(state[key] for state in averages for key in sorted(state))]
        digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in values))
        print(run.steps, digest.hexdigest(), file=states, flush=True)

    note()
    pathlib.Path(f"pid.{run.attempt}.{run.rank}").write_text(str(os.getpid()))
    for _ in loader.epochs(1_000_000):
        for (batch,) in loader:
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
            note()
"""


@pytest.mark.promise("Checkpoints: A rank that is killed while every step is saved goes on with the same bits")
@pytest.mark.parametrize("kills", [6, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(7200)])])
def test_a_training_that_saves_in_every_step_goes_on_with_the_same_bits_after_kills(
    forked_pods: Callable[..., Pods], root: Path, kills: int
) -> None:
    generator = random.Random(kills)
    limits = {pod_env.RESTARTS: "1000", user_env.BACKOFF: "0", user_env.RETRY_SAME_FAILURE: "1"}
    run = forked_pods(2, 1, script=TRAINS, **limits, **{pod_env.MEMORY_ROOT: str(root), user_env.LEASE: "10"})
    run.start("train.py")
    for attempt in range(kills):
        pid = run.pid(attempt, generator.randrange(2))
        time.sleep(generator.random() * 0.5)
        os.kill(pid, signal.SIGKILL)
    run.pid(kills, 0)
    noted: dict[int, str] = {}
    begins = []
    for attempt in range(kills + 1):
        lines = []
        for path in run.folder.glob(f"states.{attempt}.*"):
            lines += [line for line in path.read_text().splitlines() if len(line.partition(" ")[2]) == 64]
        for line in lines:
            step, _, digest = line.partition(" ")
            assert noted.setdefault(int(step), digest) == digest, f"other bits after step {step} in attempt {attempt}"
        begins.append(min(int(line.split()[0]) for line in lines))
    assert begins == sorted(begins)
    assert begins[-1] > 0
