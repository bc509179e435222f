"""`flk run` without what only Linux has: the path of macOS, where ranks are spawned, there is no /proc and no prctl."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.local.test_run import Command, flk
from tests.support.processes import alive, until

__all__ = ["flk"]
FOLDER = Path(__file__).parents[1] / "support" / "other_system"
LACKS = {"PYTHONPATH": str(FOLDER)}
ENDS = 60  # seconds in which processes notice that their parent has ended, on a machine that does much else


def test_ranks_restart_and_end_with_the_command(flk: Command) -> None:
    flk.write("""
        import os, pathlib, sys, time
        attempt, rank = os.environ["FLK_ATTEMPT"], os.environ["RANK"]
        assert not hasattr(os, "memfd_create")
        assert "torch" not in sys.modules, "this is a fork of a process that has imported torch"
        if attempt == "0":
            if rank == "1":
                raise ValueError("once")
            time.sleep(600)
        pathlib.Path(f"pids.{attempt}.{rank}").write_text(f"{os.getpid()} {os.getppid()} {os.getppid()} .")
        time.sleep(600)
    """)
    process = flk.start("run", "train.py", "--processes", "2", "--restarts", "1", env=LACKS)
    pids = flk.pids(1, 2)
    rank, server = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids[:2])
    assert b"forkserver" in server
    assert rank != server, "a rank is a fork of the server"
    process.kill()
    until(lambda: not any(map(alive, pids)), "the ranks end", seconds=ENDS)
    stdout, stderr = process.communicate(timeout=ENDS)
    assert "ValueError: once" in stderr
    assert "AttributeError" not in stdout + stderr
    assert "AssertionError" not in stdout + stderr


@pytest.mark.soak
def test_a_run_resumes_from_its_checkpoint(flk: Command) -> None:
    flk.write("""
        import os, signal, torch
        import flk_runtime as flk
        with flk.init(save_every=2) as run:
            model = torch.nn.Linear(2, 1)
            model, optimizer = run.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1))
            loader = run.loader(torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=4)
            for (x,) in loader:
                optimizer.zero_grad()
                run.backward(model(x).sum())
                run.step(optimizer)
                if run.steps == 3 and run.rank == 1 and os.environ["FLK_ATTEMPT"] == "0":
                    os.kill(os.getpid(), signal.SIGSEGV)
            print("ends at", run.steps)
    """)
    code, stdout, stderr = flk("run", "train.py", "--replicas", "2", "--processes", "2", "--restarts", "1", env=LACKS)
    assert code == 0, stderr
    assert "resume" in stdout + stderr, stdout + stderr
