"""`flk run` as a user calls it: exit codes, output, signals, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from flk.local.gpus import count_gpus
from flk_runtime.contract.exit_codes import ExitCode
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


def test_a_package_of_several_files_runs(flk: Command) -> None:
    flk.write("VALUE = 41", "package/deep/model.py")
    flk.write("from package.deep.model import VALUE\nimport sys\nprint(VALUE + 1, sys.argv[1:])", "package/train.py")
    code, stdout, stderr = flk("run", *WITHOUT_TORCH, "-m", "package.train", "--", "--replicas", "x")
    assert code == 0, stderr
    assert stdout == "[rank 0] 42 ['--replicas', 'x']\n"


def test_a_failing_rank_is_named_and_gives_the_code_of_the_contract(flk: Command) -> None:
    flk.write("""
        import os, torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "2":
            raise KeyError("no such feature")
        dist.barrier()
    """)
    code, _, stderr = flk("run", "train.py", "--replicas", "2", "--processes", "2", "--restarts", "0", "--name", "gpt")
    assert code == ExitCode.TRAINING
    last = stderr.splitlines()[-1]
    raised = "rank 2 in gpt-worker-1 raised KeyError: 'no such feature'"
    assert re.fullmatch(rf"error: job gpt failed after \d+s: {raised}; not retried: .*", last)


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


def test_a_launcher_that_is_killed_again_and_again_is_given_up(flk: Command) -> None:
    flk.write("""
        import os, pathlib, signal
        def parent(pid):
            return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent(os.getppid()), signal.SIGKILL)
    """)
    code, _, stderr = flk("run", *WITHOUT_TORCH, "train.py", "--disruptions", "1")
    assert code == ExitCode.INFRASTRUCTURE
    assert stderr.count("restarting it") == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_everything(flk: Command, number: int, code: int) -> None:
    flk.write(HOLD)
    process = flk.start("run", *WITHOUT_TORCH, "train.py", "--replicas", "2")
    pids = flk.pids(0, 2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=END)
    assert process.returncode == code, stderr
    until(lambda: not any(alive(pid) for pid in pids), "no process is left")


def test_a_job_that_asks_for_gpus_says_that_this_machine_has_none(flk: Command) -> None:
    flk.write("")
    code, _, stderr = flk("run", *WITHOUT_TORCH, "train.py", "--gpu", "1")
    assert ("/dev has none of NVIDIA's" in stderr) == (count_gpus() == 0)
    assert code == 0, stderr


def test_ranks_may_save_if_their_output_cannot_be_written(flk: Command) -> None:
    flk.program = ["sh", "-c", 'exec "$0" -m flk "$@" >/dev/full', sys.executable]
    flk.write("""
        import pathlib, signal, sys, time

        def save(*_):
            pathlib.Path("saved").touch()
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        print("the disk is full", flush=True)
        while True:
            time.sleep(0.05)
    """)
    code, _, stderr = flk("run", *WITHOUT_TORCH, "train.py", timeout=END)
    assert (code, (flk.folder / "saved").exists()) == (1, True), stderr
    assert "flk: SIGTERM: ending 1 pod\n" in stderr
    assert stderr.endswith("error: cannot write to stdout: no space left on device\n")


def test_ranks_that_ignore_signals_do_not_hold_it_up(flk: Command) -> None:
    flk.write("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + textwrap.dedent(HOLD))
    process = flk.start("run", *WITHOUT_TORCH, "train.py")
    pids = flk.pids(0, 1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)  # the bound that local.py promises, with room for a busy machine
    assert process.returncode == ExitCode.INTERRUPTED
    until(lambda: not any(alive(pid) for pid in pids), "no process is left")


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


def test_check_says_what_is_wrong_and_ends_with_2(flk: Command) -> None:
    flk.write("print('never')")
    variables = ["--env", "GLOO_SOCKET_IFNAME=eth77", "--restarts", "3"]
    code, stdout, stderr = flk("run", "train.py", "--processes", "2", "--check", *variables)
    assert code == ExitCode.USAGE
    (line,) = stdout.splitlines()
    assert line.startswith("[rank 0] fault     GLOO_SOCKET_IFNAME=eth77 names a network interface that does not exist")
    assert "attempt 2" not in stderr


def test_a_missing_secret_is_refused(flk: Command) -> None:
    flk.write("print('never')")
    code, stdout, stderr = flk("run", "train.py", "--secret", "WANDB_KEY=wandb:key")
    assert (code, stdout) == (2, "")
    assert "WANDB_KEY is not set in this environment" in stderr
    secret = ["--secret", "WANDB_KEY=wandb:key"]
    code, stdout, _ = flk("run", *WITHOUT_TORCH, "train.py", *secret, env={"WANDB_KEY": "x"})
    assert (code, stdout) == (0, "[rank 0] never\n")


def test_what_another_launcher_left_in_the_environment_does_not_matter(flk: Command) -> None:
    flk.write("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ.get('PET_NNODES'))")
    left = {"RANK": "7", "WORLD_SIZE": "9", "PET_NNODES": "3", "FLK_PODS": "5"}
    code, stdout, stderr = flk("run", *WITHOUT_TORCH, "train.py", env=left)
    assert (code, stdout) == (0, "[rank 0] 0 1 None\n"), stderr
