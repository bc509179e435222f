"""Measure what all metrics of a job cost a training whose steps take 20 ms.

    python benchmarks/telemetry.py [--rounds 16] [--ranks 2]

Two jobs run under flk's launcher, and train in turns, a round of 10 s each:

- with metrics: `Run.step` after each step, which prints a line every 10 steps, and `Run.log` every 100 steps; the
  launcher's telemetry; a page for Prometheus, which is read once in a round; and the lines in TensorBoard files.
- without: the same loop without `Run.step` and `Run.log`, in a job without telemetry, page and sinks.

What is measured is the processor time of a rank, the one that takes most, and of the launcher together, threads
included, since the difference is far below the noise of a clock on a machine that does other things. The work of a
step is a pause of 20 ms, whose time is added to both sides. Threads and the launcher delay the training by their
processor time at most.

Goal: at least 0.995 of the rate without.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import flk_runtime
import launch
import measure

GOAL = measure.at_least(0.995)
STEP, STEPS = 0.02, 500  # seconds of a step, and steps of a round
LOG_EVERY = 100  # steps between two calls of Run.log
ADDRESS: Final = "BENCHMARK_ADDRESS"  # variable of the ranks: the port at which this program tells them to train
WITH: Final = "BENCHMARK_WITH"  # variable of the ranks: 1 with metrics


class Job:
    """A job whose ranks wait for rounds. ``port`` is that of its page of metrics; 0: it has no metrics."""

    def __init__(self, ranks: int, folder: Path, port: int) -> None:
        sinks = {"FLK_METRICS": f"tensorboard:{folder}" if port else "none", "FLK_METRICS_PORT": str(port)}
        with socket.create_server(("127.0.0.1", 0)) as server:
            own = {ADDRESS: str(server.getsockname()[1]), WITH: str(int(port > 0))}
            telemetry = {"FLK_TELEMETRY": "on" if port else "off"}
            (process,) = launch.flk([os.path.abspath(__file__)], ranks)
            started = launch.Process(process.command, {**process.variables, **sinks, **own, **telemetry})
            self.process = started.start(folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            server.settimeout(120)
            self._ranks = [server.accept()[0] for _ in range(ranks)]
        self._page = f"http://127.0.0.1:{port}/metrics" if port else ""

    def rate(self) -> float:
        """Steps per second of a round."""
        began = _processor_time(self.process.pid)
        for rank in self._ranks:
            rank.sendall(b"1")
        if self._page:
            with urllib.request.urlopen(self._page, timeout=30) as answer:
                assert b"flk_making_progress" in answer.read()
        slowest = max(_number(rank) for rank in self._ranks)
        return 1 / (STEP + (slowest + _processor_time(self.process.pid) - began) / STEPS)

    def close(self) -> None:
        """Have the ranks end. Raises SystemExit if the job fails."""
        for rank in self._ranks:
            rank.close()
        if code := self.process.wait():
            raise SystemExit(f"a job of telemetry.py ended with {code}")


def _processor_time(pid: int) -> float:
    """Seconds of processor time of a process, its threads included, from the clock that the kernel has for it."""
    return time.clock_gettime((~pid << 3) | 2)  # CPUCLOCK_SCHED of <linux/posix-timers.h>


def _number(connection: socket.socket) -> float:
    """The number that a rank sends after a round."""
    sent = connection.recv(8, socket.MSG_WAITALL)
    if len(sent) < 8:
        raise SystemExit("a rank of telemetry.py has ended")
    return float(struct.unpack("d", sent)[0])


def train() -> None:
    """Be a rank: make a round of steps for each byte that comes, and answer with its processor time in seconds."""
    metrics = os.environ[WITH] == "1"
    with flk_runtime.init(device="cpu") as run, _connection() as orders:
        while orders.recv(1):
            began = time.process_time()
            for number in range(STEPS):
                time.sleep(STEP)
                if metrics:
                    run.step(loss=1.0, lr=1e-3, grad_norm=0.5)
                    if number % LOG_EVERY == 0:
                        run.log(val=0.5)
            orders.sendall(struct.pack("d", time.process_time() - began))


@contextlib.contextmanager
def _connection() -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(os.environ[ADDRESS]))) as connection:
        yield connection


def main() -> int:
    if ADDRESS in os.environ:
        train()
        return 0
    parser = measure.parser(__doc__, rounds=16)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    report = measure.Report("telemetry", arguments)
    with tempfile.TemporaryDirectory() as folder:
        jobs = {
            "with": Job(arguments.ranks, Path(folder), launch.free_port()),
            "without": Job(arguments.ranks, Path(folder), 0),
        }
        cases = {name: job.rate for name, job in jobs.items()}
        rates = measure.alternate(cases, arguments.rounds, warmup=1, show="{:.3f} steps/s".format)
        for job in jobs.values():
            job.close()
    what = f"rate of steps of 20 ms, {arguments.ranks} ranks, with all metrics / without"
    report.compare(what, rates["with"], rates["without"], GOAL, "steps/s")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
