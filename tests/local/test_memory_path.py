"""Checkpoints on a local disk (--memory-path), with real launchers of several pods on this machine."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flk_runtime.contract import pod_env, user_env
from flk_runtime.launcher.replication.service import is_in_memory
from tests.local.test_memory import begun, reach, restart, start
from tests.support.memory import TRAIN, delete_pods
from tests.support.pods import Pods


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder for checkpoints that is not in memory, with a short path: a socket is in it."""
    with tempfile.TemporaryDirectory(prefix="flk-", dir="/var/tmp") as folder:
        if is_in_memory(folder):
            pytest.skip("/var/tmp is in memory")
        yield Path(folder)


def job(forked_pods: Callable[..., Pods], pods: int, disk: Path, **variables: str) -> Pods:
    settings = {pod_env.MEMORY_PATH: str(disk), pod_env.RESTARTS: "3", user_env.LEASE: "3", **variables}
    return forked_pods(pods, 1, script=TRAIN, **settings)


@pytest.mark.promise("Checkpoints: Memory is refused at the first save, or enough for any restore")
def test_ranks_launchers_and_pods_that_are_lost_restore_from_the_disk(
    forked_pods: Callable[..., Pods], disk: Path
) -> None:
    run = job(forked_pods, 2, disk)
    start(run, 60)
    reach(run, 12)
    os.kill(run.pid(0, 1), signal.SIGKILL)
    run.until(lambda: len(begun(run)) == 2, "the ranks restore")
    reach(run, 22)
    run.running[1].kill()
    run.running[1].wait()
    restart(run, 60, 1)
    run.until(lambda: len(begun(run)) == 3, "the ranks restore from the files of a killed launcher")
    reach(run, 42)
    delete_pods(run, disk, 1)
    restart(run, 60, 1)
    assert run.wait() == [0, 0], run.logs_of_all()
    steps = begun(run)
    assert steps[0] == 0
    assert steps[1] >= 10
    assert steps[2] >= 20
    assert steps[3] >= 40
    assert {attempt.restored_from for attempt in run.record().attempts[1:]} == {"memory"}
    assert "keeps checkpoints on the disk of this pod and of pod 1: each pod uses up to" in run.log(0)
    assert list(disk.iterdir()) == []


def test_a_disk_without_room_or_that_cannot_be_written_to_keeps_nothing(
    forked_pods: Callable[..., Pods], disk: Path
) -> None:
    run = job(forked_pods, 1, disk, **{pod_env.DISK: str(1 << 20)})
    start(run, 3, save_every=1)
    assert run.wait() == [0], run.logs_of_all()
    assert "no room for checkpoints on the disk of pod 0: 2 MiB are needed and the limit is 512 KiB" in run.log(0)
    file = disk / "file"
    file.touch()  # root may write into any folder
    run = job(forked_pods, 1, file)
    start(run, 3, save_every=1)
    assert run.wait() == [0], run.logs_of_all()
    assert run.log(0).count(f"keeps no checkpoints in memory: {file}: ") == 1
