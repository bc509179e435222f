"""Run a job on this machine: one launcher for each replica, with the environment variables of its pod.

`LocalRun` also restarts a launcher that was killed, as the training operator recreates a pod.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flk.errors import FlkError, UsageError
from flk.local.machine import count_gpus, interpreter, launcher_variables, on_cpus, shares
from flk.local.places import checkpoints_of_this_run, memory
from flk.local.shown import Shown
from flk.spec.job import Job
from flk.user.terminal import handled_signals
from flk_runtime.contract import ExitCode, pod_env, pod_layout, user_env
from flk_runtime.contract.quantities import plural

KILL_AFTER = 3.0  # seconds after the ranks' grace period after which all processes are killed
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Pod:
    """The launcher of one replica, and the incomplete last line of each of its outputs."""

    index: int
    process: subprocess.Popen[bytes]
    rest: dict[int, bytes] = field(default_factory=dict)  # by file descriptor


class LocalRun:
    """A job on this machine. ``run`` returns the exit code of the job's pods."""

    def __init__(self, job: Job, folder: Path) -> None:
        """``job`` has a name; its ranks start in ``folder``."""
        self._job = job
        self._folder = folder
        if sys.platform not in ("linux", "darwin"):
            raise UsageError(
                f"`flk run` needs Linux or macOS, because its launchers do (this is {sys.platform})",
                hint="use flk submit, or run flk in a Linux container",
            )
        here = count_gpus()
        self._gpus = shares(job, here)
        self._on_cpus = on_cpus(job, here, self._gpus)
        self._known_gpus = job.resources.gpu if here and self._gpus else 0
        self._python = interpreter()
        self._pods: dict[int, _Pod] = {}
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []
        self._killed = 0  # launchers that were killed
        self._stopped_by: int | None = None
        self._kill_at: float | None = None
        self._unwritten: FlkError | None = None  # why the output could not be written
        self.shown = Shown(keeps=job.checkpoint is not None)
        """What the run has said: its record, and the words with which it ends."""

    def run(self) -> int:
        """Start all launchers and wait until they have ended.

        SIGTERM lets the ranks save, as in a pod, within the job's grace period. Ctrl-C gives them 5 seconds to end.
        Raises FlkError, after the ranks could save, if their output cannot be written.
        """
        with (
            tempfile.TemporaryDirectory(prefix="flk-") as scratch,
            checkpoints_of_this_run(self._job, self._folder),
            memory() as in_memory,
            self._handled_signals(),
        ):
            hub, *self._ports = pod_layout.free_ports(1 + self._job.workers)
            shared = launcher_variables(self._job, self._folder, Path(scratch), self._python, hub)
            self._base = shared | in_memory
            if self._on_cpus:
                self._say(self._on_cpus)
            try:
                for index in range(self._job.created_pods):
                    self._start(index)
                return self._follow()
            finally:
                self._kill()

    def _start(self, index: int) -> None:
        values = self._base | {
            pod_env.WORK: str(self._folder),
            pod_env.RDZV_ENDPOINT: f"127.0.0.1:{self._ports[index * self._job.workers // self._job.replicas]}",
            pod_env.POD_INDEX: str(index),
            user_env.POD_NAME: f"{self._job.name}-worker-{index}",
        }
        if self._known_gpus:
            values[pod_env.GPUS] = str(self._known_gpus)
        if self._gpus:
            values[pod_layout.VISIBLE_GPUS] = self._gpus[index]
        # In a session of its own, so that the terminal's Ctrl-C reaches only flk, which forwards it once.
        process = subprocess.Popen(
            [self._python[0], "-u", "-m", "flk_runtime", "--", *self._job.command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self._folder,
            env=values,
            start_new_session=True,
        )
        pod = _Pod(index, process)
        self._pods[index] = pod
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source:
                os.set_blocking(source.fileno(), False)
                pod.rest[source.fileno()] = b""
                self._selector.register(source, selectors.EVENT_READ, (source, pod, sink))

    def _follow(self) -> int:
        codes: dict[int, int] = {}
        while self._pods:
            timeout = 0.5 if self._kill_at is None else max(0.0, min(0.5, self._kill_at - time.monotonic()))
            for key, _ in self._selector.select(timeout):
                if key.data:
                    self._forward(*key.data)
                else:
                    with contextlib.suppress(BlockingIOError):
                        os.read(key.fd, 4096)
            while self._signals:
                self._handle_signal(self._signals.pop(0))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill()
            for pod in [pod for pod in self._pods.values() if not pod.rest and pod.process.poll() is not None]:
                code = pod.process.returncode
                del self._pods[pod.index]
                if (code < 0 or code >= 128) and self._kill_at is None:
                    self._killed += 1
                    if self._killed > self._job.disruptions:
                        self._say(f"the launcher of pod {pod.index} was killed, and no disruptions are left")
                        self._kill()
                        return int(ExitCode.INFRASTRUCTURE)
                    self._say(f"the launcher of pod {pod.index} was killed; restarting it, as the operator would")
                    self._start(pod.index)
                else:
                    codes[pod.index] = code if code >= 0 else 128 - code
        if self._unwritten is not None:
            raise self._unwritten
        if self._stopped_by is not None:
            return int(ExitCode.INTERRUPTED if self._stopped_by == signal.SIGINT else ExitCode.PREEMPTED)
        record = self.shown.record
        if record and record.outcome != "running":
            return record.code
        return max(codes.values(), default=0)

    def _forward(self, source: IO[bytes], pod: _Pod, sink: IO[str]) -> None:
        """Write complete lines to ``sink``, without what is not for people."""
        fd = source.fileno()
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return
        head, newline, tail = (pod.rest[fd] + data).rpartition(b"\n")
        if not data:
            head, newline, tail = pod.rest[fd], b"", b""
        kept = []
        for line in head.split(b"\n") if head or newline else []:
            shown = self.shown.line(line.decode(errors="replace"), on_terminal=sink.isatty())
            if shown is not None:
                kept.append(f"{shown}\n")
        if kept:
            try:
                sink.write("".join(kept))
                sink.flush()
            except BrokenPipeError:
                pass
            except FlkError as error:  # the disk is full: the ranks save, and the run ends with the error
                self._unwritten = error
                self._signals.append(signal.SIGTERM)
        pod.rest[fd] = tail
        if not data:
            self._selector.unregister(source)
            source.close()
            del pod.rest[fd]

    def _handle_signal(self, number: int) -> None:
        if self._stopped_by is not None:
            if number == signal.SIGINT:  # Ctrl-C again kills at once
                self._kill()
            return
        self._stopped_by = number
        grace = pod_layout.INTERRUPT_GRACE if number == signal.SIGINT else self._job.grace
        self._kill_at = time.monotonic() + grace + KILL_AFTER
        self._say(f"{signal.Signals(number).name}: ending {plural(len(self._pods), 'pod')}")
        for pod in self._pods.values():
            with contextlib.suppress(ProcessLookupError):
                pod.process.send_signal(number)

    def _kill(self) -> None:
        """Kill all launchers, whose ranks then end: by the kernel, and on macOS by themselves within a second."""
        for pod in self._pods.values():
            with contextlib.suppress(ProcessLookupError):
                pod.process.kill()
        for pod in self._pods.values():
            pod.process.wait()

    def _say(self, text: str) -> None:
        print(f"flk: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def _handled_signals(self) -> Iterator[None]:
        wakeup, alarm = socket.socketpair()
        wakeup.setblocking(False)
        alarm.setblocking(False)
        self._selector.register(wakeup, selectors.EVENT_READ, None)
        handlers = {
            number: lambda n, _: self._signals.append(n)
            for number in _SIGNALS
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
        }
        with handled_signals(handlers):
            fd = signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(fd)
                self._selector.close()
                wakeup.close()
                alarm.close()


def as_check(job: Job) -> Job:
    """Return a job that only checks whether this one can start: its ranks run flk_runtime/check.py."""
    return job.changed(command=["-m", "flk_runtime.check"], restarts=0, disruptions=0, checkpoint=None)
