"""Each cause of a job that hangs at its start is produced here: every rank ends with a sentence that names it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]

# What each rank prints: the error on one line after its name, or that it began.
INIT = """
    import flk_runtime as flk
    try:
        with flk.init(device="cpu") as run:
            print("began", run.world_size, run.mean(run.rank))
    except (flk.SetupError, flk.RendezvousError) as error:
        print(type(error).__name__ + ":", str(error).replace("\\n", " | "))
"""
# Put before INIT, the ranks call init at the same time, however long each takes to start.
AT_ONCE = """
    import os, time
    from pathlib import Path
    import flk_runtime, torch
    here = Path(__file__).parent
    (here / f"ready-{os.getpid()}").touch()
    while len(list(here.glob("ready-*"))) < int(os.environ["PROCESSES"]):
        time.sleep(0.01)
"""
SHORT = {"FLK_PREFLIGHT_TIMEOUT": "2"}  # seconds; where a rank is never reached
LONG = {"FLK_PREFLIGHT_TIMEOUT": "60"}  # where the fault has to be found before the timeout


def said(ended: list[Any]) -> list[str]:
    """The last line of each rank's output."""
    return [rank.lines[-1] if rank.lines else "" for rank in ended]


def the_same(ended: list[Any]) -> str:
    lines = set(said(ended))
    assert len(lines) == 1, lines
    return lines.pop()


@pytest.mark.promise("Jobs: Ranks that differ or are missing end all with one sentence, which has a cure")
def test_a_rank_that_comes_twice(ranks: Ranks) -> None:
    line = the_same(ranks(INIT, 3, LONG, {2: {"RANK": "1", "LOCAL_RANK": "1"}}))
    assert re.match(r"SetupError: rank 1 joined twice: process \d+ on node \S+ and process \d+ on node \S+; give", line)


@pytest.mark.promise("Jobs: Ranks that differ or are missing end all with one sentence, which has a cure")
def test_a_rank_that_does_not_come(ranks: Ranks) -> None:
    environment = {"FLK_PREFLIGHT_TIMEOUT": "8", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "PROCESSES": "2"}
    line = the_same(ranks(AT_ONCE + INIT, 2, environment))
    assert line.startswith(
        "RendezvousError: ranks 2-5 of 6 (on nodes 1-2, numbered from 0) did not join within 8 s, 2 joined: read"
    )


def test_a_master_address_that_is_not_rank_0s(ranks: Ranks) -> None:
    """203.0.113.1 is nobody's, by RFC 5737; what is between decides whether that is refused or not answered."""
    first, second = said(ranks(INIT, 2, SHORT | {"MASTER_ADDR": "203.0.113.1"}))
    assert re.match(r"SetupError: rank 0 runs on node \S+, and does not reach its own store at the master's", first)
    assert "did not reach the master 203.0.113.1:" in second
    assert "check that" in second
    assert "MASTER_ADDR" in second


@pytest.mark.promise("Jobs: Ranks that differ or are missing end all with one sentence, which has a cure")
def test_a_name_that_does_not_resolve(ranks: Ranks) -> None:
    for rank, line in enumerate(said(ranks(INIT, 2, SHORT | {"MASTER_ADDR": "no-such-host.invalid"}))):
        assert re.match(
            rf"RendezvousError: rank {rank} on node \S+ did not reach the master no-such-host.invalid:\d+ \(", line
        )
        assert "the name does not resolve there" in line


def test_a_port_that_another_program_uses(ranks: Ranks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        first, second = said(ranks(INIT, 2, {"FLK_PREFLIGHT_TIMEOUT": "4", "MASTER_PORT": str(port)}))
    assert f"cannot open the store at port {port} (" in first
    assert "EADDRINUSE" in first
    assert "end what listens there or choose another MASTER_PORT, or give this" in first
    assert "what accepts connections there does not answer as rank 0's store does" in second


def test_ranks_that_differ(ranks: Ranks) -> None:
    line = the_same(ranks(INIT, 2, LONG, {1: {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}}))
    node = socket.gethostname()
    assert line.startswith(f"SetupError: 2 world sizes: 2 on rank 0 on node {node}, 4 on rank 1 on")


# Calls that differ between the ranks, and what all ranks say of them.
OPTIONS = {
    "parallelize(model, shard_size=1 + rank)": "parallelize of model: the ranks differ, so nothing was exchanged: "
    "shard_size is 1 on rank 0, and 2 on rank 1",
    "parallelize(model, recompute=bool(rank), blocks='Linear')": "recompute is False on rank 0, and True on rank 1",
    "loader(range(8), 1 + rank)": "the ranks differ, so nothing was exchanged: batch_size is 1 on rank 0, and 2 on",
    "loader(range(8 + rank), 1)": "length of the dataset is 8 on rank 0, and 9 on rank 1",
    "loader(range(8), 1) if rank else run.parallelize(model)": "the call is parallelize of model on rank 0, and loader "
    "'loader-2' on rank 1",
}


def test_options_that_differ_between_ranks(ranks: Ranks) -> None:
    script = f"""
        import flk_runtime as flk, torch
        with flk.init(device="cpu", strategy="hybrid_shard") as run:
            rank, model = run.rank, torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            for call in {list(OPTIONS)}:
                try:
                    eval("run." + call)
                except flk.SetupError as error:
                    print(error)
    """
    for rank in ranks(script, 2):
        assert all(words in line for line, words in zip(rank.lines, OPTIONS.values(), strict=True)), rank.lines


HYBRID = """
    import flk_runtime as flk, torch
    with flk.init(device="cpu", strategy="hybrid_shard") as run:
        try:
            run.parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
            print("built")
        except (flk.SetupError, flk.RendezvousError) as error:
            print(error)
"""


def of_nodes(nodes: list[int]) -> dict[int, dict[str, str]]:
    """Variables of ranks by the node that each runs on."""
    found = {}
    for rank, node in enumerate(nodes):
        found[rank] = {
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(len(set(nodes))),
            "LOCAL_RANK": str(nodes[:rank].count(node)),
            "LOCAL_WORLD_SIZE": str(nodes.count(node)),
            "FLK_NODE_NAME": f"node-{node}",
        }
    return found


def test_hybrid_sharding_on_nodes_of_different_sizes_is_refused(ranks: Ranks) -> None:
    line = the_same(ranks(HYBRID, 4, {}, of_nodes([0, 0, 1, 2])))
    assert "ranks on this node (pass shard_size where nodes differ) is 2 on ranks 0-1, and 1 on ranks 2-3" in line
    line = the_same(ranks(HYBRID, 4, {}, of_nodes([0, 1, 0, 1])))
    assert "and here neighbouring ranks are on different nodes: number ranks node by node" in line


# The script of a rank that fails once: what torchrun itself can't recover from is its own store, full of the dead
# ranks' addresses.
FAIL_ONCE = """
    import sys
    import flk_runtime as flk
    with flk.init(device="cpu") as run:
        run.mean(1.0)
        if run.attempt == 0 and run.rank == 1:
            raise KeyError("once")
        run.mean(1.0)
        sys.stdout.write(f"rank {run.rank} of {run.world_size} done in attempt {run.attempt}\\n")  # in one piece
"""


def start(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(textwrap.dedent(FAIL_ONCE))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"} | variables
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.soak
def test_torchrun_restarts(tmp_path: Path) -> None:
    ended = start(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "train.py"],
        tmp_path,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank} of 2 done in attempt 1" for rank in range(2)]


def test_check_as_the_ranks_of_a_launcher(tmp_path: Path) -> None:
    """What it prints if there is no fault is in test_run.py."""
    (tmp_path / "check").write_text("print('a script of this name')")
    ended = start(["-m", "flk_runtime", "check"], tmp_path, FLK_SEED="x")
    assert (ended.returncode, ended.stdout) == (2, "fault     FLK_SEED=x: expected an integer\n")
    ended = start(["-m", "flk_runtime", "--", "check"], tmp_path, FLK_START="spawn")  # which imports no torch
    assert ended.stdout == "[rank 0] a script of this name\n"
