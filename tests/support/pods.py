"""Launchers as real processes on this machine, which stand for the pods of one job."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Protocol

from flk_runtime.contract import pod_env, user_env
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import JobRecord
from tests.support.network import Host, enter
from tests.support.processes import until

END = 120  # seconds for a job of a few steps, on a machine that does other things too

# Each rank writes its process id to a file in each step, so that a test can wait for a step.
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


# The code of a launcher that is forked from a process with torch: `python -m flk_runtime` without the start of the
# interpreter and the imports.
FORKED = """
import multiprocessing, os, signal, sys
multiprocessing.set_start_method(None, force=True)  # the script may choose; here it was forkserver
for number in (signal.SIGINT, signal.SIGCHLD):
    signal.signal(number, signal.SIG_DFL)
os.environ.clear()
os.environ.update(environment)
if host:
    enter(host)
os.chdir(folder)
sys.path.insert(0, folder)
file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.dup2(file, 1), os.dup2(file, 2), os.close(file)
from flk_runtime.launcher import start
start.main(command)
"""


class Running(Protocol):
    """The process of a launcher, as subprocess.Popen."""

    pid: int

    def wait(self, timeout: float | None = None) -> int: ...
    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def terminate(self) -> None: ...
    def send_signal(self, sig: int) -> None: ...


class ForkedLauncher:
    """A launcher that was forked from a process with torch, so that its start takes no import."""

    def __init__(
        self,
        server: ForkServerContext,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        log: Path,
        host: str = "",
    ) -> None:
        """``host`` is the network namespace that it runs in; empty: that of this process."""
        names = {
            "command": list(command),
            "environment": dict(environment),
            "folder": str(folder),
            "output": str(log),
            "host": host,
            "enter": enter,
        }
        self._process = server.Process(target=exec, args=(FORKED, names))
        self._process.start()
        self.pid = int(self._process.pid or 0)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("launcher", timeout or 0)
        return code

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def send_signal(self, sig: int) -> None:
        os.kill(self.pid, sig)


class Pods:
    """The launchers of one job, one for each pod."""

    def __init__(
        self,
        folder: Path,
        port: int,
        pods: int,
        processes: int,
        fork_server: ForkServerContext | None = None,
        **variables: str,
    ) -> None:
        """With ``fork_server``, the launchers are forks of it, which start faster than new interpreters."""
        self.folder = folder
        self.pods = pods
        self.fork_server = fork_server
        self.variables = {
            user_env.JOB: "test",
            pod_env.PODS: str(pods),
            pod_env.PROCESSES: str(processes),
            pod_env.RDZV_ENDPOINT: f"127.0.0.1:{port}",
            pod_env.POD_IP: "127.0.0.1",
            pod_env.GRACE: "2",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self.hosts_of: dict[int, Host] = {}  # of pods that run in network namespaces
        self.variables_of: dict[int, dict[str, str]] = {}  # variables of one pod
        self.running: dict[int, Running] = {}
        self.logs: dict[int, list[Path]] = {index: [] for index in range(pods)}

    def write(self, script: str, name: str = "train.py") -> None:
        (self.folder / name).write_text(textwrap.dedent(script))

    def start(self, *command: str, only: int | None = None, stdout: int | None = None) -> None:
        """Start the launcher of each pod, or of one. Its output goes to its log, or to the descriptor ``stdout``."""
        for index in range(self.pods) if only is None else [only]:
            log = self.folder / f"log.{index}.{len(self.logs[index])}"
            self.logs[index].append(log)
            own = {
                pod_env.POD_INDEX: str(index),
                user_env.POD_NAME: f"test-worker-{index}",
                pod_env.TERMINATION_LOG: str(self.folder / f"termination.{index}"),
                **self.variables_of.get(index, {}),
            }
            environment = os.environ | self.variables | own
            if self.fork_server:
                log.write_text("")
                host = self.hosts_of[index].name if index in self.hosts_of else ""
                self.running[index] = ForkedLauncher(self.fork_server, command, environment, self.folder, log, host)
                continue
            with log.open("w") as file:
                self.running[index] = subprocess.Popen(
                    [
                        *(self.hosts_of[index].prefix if index in self.hosts_of else []),
                        sys.executable,
                        "-m",
                        "flk_runtime",
                        "--",
                        *command,
                    ],
                    env=environment,
                    cwd=self.folder,
                    stdout=file if stdout is None else stdout,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                )

    def wait(self) -> list[int]:
        return [self.running[index].wait(END) for index in range(self.pods)]

    def log(self, index: int = 0) -> str:
        return "".join(path.read_text(errors="replace") for path in self.logs[index])

    def logs_of_all(self) -> str:
        return "".join(self.log(index) for index in range(self.pods))

    def record(self, index: int = 0) -> JobRecord:
        record = JobRecord.from_json((self.folder / f"termination.{index}").read_text())
        assert record is not None
        return record

    def failure(self, index: int = 0, attempt: int | None = None) -> Failure:
        """Why the job has ended, or this attempt of it, by the record of a pod."""
        record = self.record(index)
        found = record.failure if attempt is None else record.attempts[attempt].failure
        assert found is not None
        return found

    def pid(self, attempt: int, rank: int) -> int:
        """Process id of a rank. Waits until the rank has made a step in this attempt."""
        path = self.folder / f"pid.{attempt}.{rank}"  # which the rank may be writing anew, and is empty then
        what = f"rank {rank} makes a step in attempt {attempt}"
        return int(self.until(lambda: path.exists() and path.read_text(), what))

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        return until(condition, what, context=self.logs_of_all)

    def kill(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()
