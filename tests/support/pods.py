"""Launchers as real processes on this machine, which stand for the pods of one job."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from flk_runtime import contract
from flk_runtime.contract import JobRecord
from tests.support.processes import until

END = 120  # seconds for a job of a few steps, on a machine that does other things too

# Each rank writes its process id to a file in each step, so that a test sees that it has made a step.
TRAIN = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    steps = int(sys.argv[1])
    for step in range(steps):
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
        pathlib.Path(f"pid.{attempt}.{rank}").write_text(str(os.getpid()))
        while steps > 1 and attempt < int(os.environ.get("HOLD", "0")):
            time.sleep(0.01)  # until the test ends this attempt
            dist.all_reduce(total)
    print(f"rank {rank} of {dist.get_world_size()} done in attempt {attempt}")
"""


class Pods:
    """The launchers of one job, one for each pod."""

    def __init__(self, folder: Path, port: int, pods: int, processes: int, **variables: str) -> None:
        self.folder = folder
        self.pods = pods
        self.variables = {
            contract.JOB: "test",
            contract.PODS: str(pods),
            contract.PROCESSES: str(processes),
            contract.RDZV_ENDPOINT: f"127.0.0.1:{port}",
            contract.POD_IP: "127.0.0.1",
            contract.GRACE: "2",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.logs: dict[int, list[Path]] = {index: [] for index in range(pods)}

    def write(self, script: str, name: str = "train.py") -> None:
        (self.folder / name).write_text(textwrap.dedent(script))

    def start(self, *command: str, only: int | None = None) -> None:
        for index in range(self.pods) if only is None else [only]:
            log = self.folder / f"log.{index}.{len(self.logs[index])}"
            self.logs[index].append(log)
            own = {
                contract.POD_INDEX: str(index),
                contract.POD_NAME: f"test-worker-{index}",
                contract.TERMINATION_LOG: str(self.folder / f"termination.{index}"),
            }
            with log.open("w") as file:
                self.running[index] = subprocess.Popen(
                    [sys.executable, "-m", "flk_runtime", "--", *command],
                    env=os.environ | self.variables | own,
                    cwd=self.folder,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )

    def wait(self) -> list[int]:
        return [self.running[index].wait(END) for index in range(self.pods)]

    def log(self, index: int = 0) -> str:
        return "".join(path.read_text() for path in self.logs[index])

    def logs_of_all(self) -> str:
        return "".join(self.log(index) for index in range(self.pods))

    def record(self, index: int = 0) -> JobRecord:
        record = JobRecord.from_json((self.folder / f"termination.{index}").read_text())
        assert record is not None
        return record

    def pid(self, attempt: int, rank: int) -> int:
        """Process id of a rank. Waits until the rank has made a step in this attempt."""
        path = self.folder / f"pid.{attempt}.{rank}"
        self.until(lambda: path.exists() and path.read_text() != "", f"rank {rank} makes a step in attempt {attempt}")
        return int(path.read_text())

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(condition, what, context=self.logs_of_all)

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
