"""The harness that runs a script as ranks ends with every rank dead, and its message names the ranks that hung."""

from __future__ import annotations

from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

from tests.support.processes import alive
from tests.support.ranks import Ranks

HANG = """
    import os, pathlib, time
    rank = os.environ["RANK"]
    pathlib.Path(os.environ["FOLDER"], f"pid.{rank}").write_text(str(os.getpid()))
    print("rank", rank, "starts", flush=True)
    if rank != "1":
        time.sleep(600)
"""


def test_ranks_that_hang_share_one_deadline_and_are_named_and_killed(
    fork_server: ForkServerContext, tmp_path: Path
) -> None:
    with pytest.raises(pytest.fail.Exception) as failed:
        Ranks(fork_server, tmp_path, patience=8)(HANG, 3, {"FOLDER": str(tmp_path)})
    message = str(failed.value)
    assert message.startswith("ranks 0, 2 of 3 did not end within 8 s\n")
    for rank in range(3):
        assert f"--- rank {rank}\nrank {rank} starts\n" in message
    assert "most recent call first" in message  # where the ranks were
    assert not any(alive(int(path.read_text())) for path in tmp_path.glob("pid.*"))


def test_an_interrupted_test_leaves_no_rank(
    fork_server: ForkServerContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupt(process: ForkServerProcess) -> bool:
        assert process.pid is not None
        assert alive(process.pid)
        started.append(process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(fork_server.Process, "is_alive", interrupt)  # in place of the signal of pytest-timeout
    with pytest.raises(KeyboardInterrupt):
        Ranks(fork_server, tmp_path, patience=0)(HANG, 1, {"RANK": "0", "FOLDER": str(tmp_path)})
    assert len(started) == 1
    assert not alive(started[0])
