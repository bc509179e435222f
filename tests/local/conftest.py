"""Real processes for the tests of the runtime library: small, few, and forked from one import of torch."""

from __future__ import annotations

import multiprocessing
import os
import socket
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch.utils.data",
    "torch._dynamo",
]
PATIENCE = 120.0  # seconds until a rank counts as hanging

# What a rank's process runs: its output goes to a file, and a warning ends it.
BOOT = """
import faulthandler, os, runpy, sys, warnings
os.environ.update(environment)
file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(file, 1), os.dup2(file, 2)
faulthandler.dump_traceback_later(patience * 0.8)
warnings.simplefilter("error")
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (negative: the signal), and all that it printed."""

    code: int
    output: str

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()


@pytest.fixture(scope="session")
def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    context.Process(target=int).start()  # the server takes the environment as it is now
    if before is None:
        del os.environ["OMP_NUM_THREADS"]
    else:
        os.environ["OMP_NUM_THREADS"] = before
    return context


@pytest.fixture
def ranks(fork_server: ForkServerContext, tmp_path: Path) -> Callable[..., list[Ended]]:
    """Run a script as ``world_size`` ranks, with torchrun's variables, and return how each ended.

    ``environment`` is added to all of them, ``of_rank`` to that of the rank with this number. Unless ``failing``, all
    must end with 0. A world of one gets no variables at all.
    """
    runs = 0

    def run(
        script: str,
        world_size: int,
        environment: Mapping[str, str] = {},
        of_rank: Mapping[int, Mapping[str, str]] = {},
        failing: bool = False,
    ) -> list[Ended]:
        nonlocal runs
        runs += 1
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        processes, outputs = [], []
        for rank in range(world_size):
            launcher = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            variables = {**(launcher if world_size > 1 else {}), **environment, **of_rank.get(rank, {})}
            outputs.append(tmp_path / f"output-{runs}-{rank}")
            names = {"environment": variables, "output": str(outputs[-1]), "script": str(path), "patience": PATIENCE}
            process = fork_server.Process(target=exec, args=(BOOT, names))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(PATIENCE)
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        texts = [output.read_text() if output.exists() else "" for output in outputs]
        shown = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(texts))
        assert not hanging, f"ranks {hanging} did not end\n{shown}"
        ended = [Ended(process.exitcode or 0, text) for process, text in zip(processes, texts, strict=True)]
        assert failing or all(rank.code == 0 for rank in ended), shown
        return ended

    return run
