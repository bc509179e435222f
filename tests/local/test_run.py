"""`flk run` as a user calls it: exit codes, output, signals, and nothing left behind."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.collection import often
from tests.support.commands import WITHOUT_TORCH, Flk
from tests.support.processes import alive, parent_of, until

END = 120  # seconds for a job of a few steps

HOLD = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen(["sleep", "600"])
    rank, attempt = os.environ["RANK"], os.environ["FLK_ATTEMPT"]
    pathlib.Path(f"pids.{attempt}.{rank}").write_text(f"{os.getpid()} {os.getppid()} {child.pid} .")
    while attempt == "0":
        time.sleep(0.05)
    child.kill()
"""


class Command(Flk):
    """`flk` as a process of its own, in a folder with a script."""

    def write(self, script: str, name: str = "train.py") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(script))

    def pids(self, attempt: int, ranks: int) -> list[int]:
        """Every process of an attempt, as soon as all ranks have started."""
        files = [self.folder / f"pids.{attempt}.{rank}" for rank in range(ranks)]
        until(lambda: all(file.exists() and file.read_text().endswith(".") for file in files), "all ranks start")
        return [int(word) for file in files for word in file.read_text().split()[:3]]


@pytest.fixture
def flk(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path)
    yield command
    command.close()


@pytest.mark.promise("Jobs: A script for torchrun runs unchanged, on this machine and in a cluster")
@pytest.mark.soak
def test_a_plain_torchrun_script_runs_unchanged_in_replicas_and_processes(flk: Command) -> None:
    flk.write("""
        import os, torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("gloo")
        model = DistributedDataParallel(torch.nn.Linear(2, 2))
        model(torch.ones(1, 2)).sum().backward()
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, (dist.get_rank(), int(os.environ["LOCAL_RANK"]), int(os.environ["GROUP_RANK"])))
        print(ranks)
        dist.destroy_process_group()
    """)
    code, stdout, stderr = flk("run", "train.py", "--replicas", "2", "--processes", "2", "--restarts", "0")
    assert code == 0, stderr
    expected = "[(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]"
    assert sorted(stdout.splitlines()) == [f"[rank {rank}] {expected}" for rank in range(4)]
    assert "flk-record" not in stdout + stderr


def test_a_killed_launcher_is_restarted_as_a_pod_would_be(flk: Command) -> None:
    flk.write(HOLD)
    process = flk.start("run", *WITHOUT_TORCH, "train.py", "--replicas", "2", "--restarts", "1")
    pids = flk.pids(0, 2)
    launcher = parent_of(pids[4])  # rank 1's parent is its launcher's fork server
    os.kill(launcher, signal.SIGKILL)
    _, stderr = process.communicate(timeout=END)
    assert process.returncode == 0, stderr
    flk.pids(1, 2)
    assert "restarting it" in stderr
    assert not [pid for pid in (pids[0], pids[3]) if alive(pid)]  # the ranks of the first attempt


@pytest.mark.promise("Jobs: flk run ends with every process ended")
@pytest.mark.parametrize(("number", "code"), often((0,), [(signal.SIGINT, 130), (signal.SIGTERM, 143)]))
def test_a_signal_ends_everything(flk: Command, number: int, code: int) -> None:
    flk.write(HOLD)
    process = flk.start("run", *WITHOUT_TORCH, "train.py", "--replicas", "2")
    pids = flk.pids(0, 2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=END)
    assert process.returncode == code, stderr
    until(lambda: not any(alive(pid) for pid in pids), "no process is left")


def test_a_run_under_nohup_outlives_its_terminal(flk: Command) -> None:
    flk.write(HOLD)
    flk.program.insert(0, "nohup")
    process = flk.start("run", *WITHOUT_TORCH, "train.py", "--restarts", "1")
    rank, server, _ = flk.pids(0, 1)
    for each in (process.pid, parent_of(server)):  # the launcher, which a terminal reaches where a user starts it alone
        os.kill(each, signal.SIGHUP)
    os.kill(rank, signal.SIGKILL)
    _, stderr = process.communicate(timeout=END)
    assert process.returncode == 0, stderr


@pytest.mark.promise("Jobs: flk run ends with every process ended")
def test_when_flk_itself_is_killed_nothing_is_left(flk: Command) -> None:
    flk.write(HOLD)
    process = flk.start("run", *WITHOUT_TORCH, "train.py", "--replicas", "2")
    pids = flk.pids(0, 2)
    process.kill()
    until(lambda: not any(alive(pid) for pid in pids), "no process is left")


def test_check_starts_the_ranks_and_nothing_else(flk: Command) -> None:
    flk.write("print('never')")
    code, stdout, stderr = flk("run", "train.py", "--replicas", "2", "--name", "gpt", "--check")
    assert code == 0, stderr
    lines = [line.removeprefix("[rank 0] ") for line in stdout.splitlines()]
    assert lines[0] == "ranks     2 on 2 nodes, launcher: flk"
    assert [line.split()[1] for line in lines if line.startswith("node ")] == ["gpt-worker-0", "gpt-worker-1"]
    assert "s for the first all-reduce" in lines[-2]
    assert lines[-1] == "ok"
