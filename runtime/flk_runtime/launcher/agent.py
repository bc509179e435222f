"""The launcher: the parent of the ranks of one pod, from its first line to the exit code of the contract.

One thread runs everything that happens here in one loop: signals, events of the rendezvous, ranks that end, their
output and their reports. The threads of the rendezvous only post events to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

from flk_runtime import contract
from flk_runtime.contract import ExitCode, Failure, JobRecord
from flk_runtime.launcher import environment as variables
from flk_runtime.launcher import forkserver
from flk_runtime.launcher import logs as output
from flk_runtime.launcher.forkserver import ForkServer, ServerDiedError
from flk_runtime.launcher.rendezvous import (
    AttemptEnded,
    AttemptStarted,
    Event,
    JobEnded,
    Leader,
    LeaderLost,
    Member,
    ThreadFailed,
)
from flk_runtime.launcher.settings import Settings, SettingsError
from flk_runtime.launcher.signals import Wakeup, code_of_signal
from flk_runtime.launcher.unpack import CodeError, unpack
from flk_runtime.system import host
from flk_runtime.system.report import write_all

KILL_AFTER = 1.0  # seconds between SIGTERM and SIGKILL for ranks whose attempt is over: they hang in a collective
FINISH_AFTER = 5.0  # seconds for a rank that has reported its exception to run its own exit handlers
_CHUNK = 1 << 16


@dataclass
class Rank:
    """A running rank: its process and what comes out of it."""

    rank: int
    local_rank: int
    pid: int
    pipes: dict[int, output.Prefixer | None]  # by descriptor; None marks the pipe of reports
    report: bytes = b""
    failure: Failure | None = None
    kill_at: float | None = None  # when it gets SIGKILL, by time.monotonic


@dataclass
class Launcher:
    """The loop. ``run`` returns the exit code."""

    settings: Settings
    wakeup: Wakeup
    server: ForkServer
    stderr: int  # the process's own is torch's, see output.stderr_set_aside
    errors: str  # folder for the ranks' error files
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.wakeup.socket, selectors.EVENT_READ)
        self.selector.register(self.server.socket, selectors.EVENT_READ)
        self.ranks: dict[int, Rank] = {}
        self.go: AttemptStarted | None = None
        self.ending = False  # the attempt is over, its ranks are being ended
        self.failures: list[Failure] = []
        self.stopping: int | None = None  # the signal that told this launcher to stop
        self.record: JobRecord | None = None
        self.lines = 0
        self.kills = host.memory_kills()
        self.leader = Leader(self.settings, self.wakeup.post, self.say) if self.settings.pod == 0 else None
        port = self.leader.port if self.leader else self.settings.port
        self.member = Member(self.settings, port, self.wakeup.post, self.say)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on stderr."""
        tag = contract.LAUNCHER_PREFIX.format(index=self.settings.pod)
        write_all(self.stderr, f"{tag}{text}\n".encode(errors="replace"))

    def run(self) -> int:
        """Run attempts until the leader says that no further one follows, or a signal ends this launcher."""
        if self.leader:
            self.leader.start()
        self.member.start()
        while True:
            ended = False
            for key, _ in self.selector.select(self._timeout()):
                if key.fileobj is self.wakeup.socket:
                    self.wakeup.clear()
                elif key.fileobj is self.server.socket:
                    ended = True
                else:
                    self._read(int(key.fd))
            while self.server.pending or (ended and _readable(self.server.socket)):
                exited = self.server.ended()
                self._rank_ended(exited.pid, exited.status)
            while self.wakeup.signals:
                self._signalled(self.wakeup.signals.pop(0))
            while self.record is None and not self.wakeup.events.empty():
                self._handle(self.wakeup.events.get())
            self._check_clock()
            host.reap_orphans()
            if not self.ranks:
                if self.stopping is not None:
                    return self._stopped(self.stopping)
                if self.record:
                    return self._finish(self.record)
                if self.ending:
                    self.ending, self.go = False, None
                    self.member.ready(self.failures)

    # What happens -----------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self._begin(event)
            case AttemptEnded():
                self._end_ranks()
                if self.leader and self.go and event.failure:
                    # A secondary failure may be reported first. The line of the next attempt names the cause.
                    why = "" if event.failure.secondary else f": {event.failure.summary}"
                    self.say(f"attempt {self.go.number + 1} ended{why}")
            case LeaderLost():
                self.failures.append(event.failure)
                self._end_ranks()
            case JobEnded():
                self.record = event.record
                self._end_ranks()
            case ThreadFailed():
                raise event.error

    def _begin(self, go: AttemptStarted) -> None:
        self.go, self.failures, self.ending = go, [], False
        if self.stopping is not None:
            return
        if self.leader:
            self._record(JobRecord("running", 0, self.settings.restarts, None, go.history))
            of = f" of at most {self.settings.restarts + 1}" if self.settings.restarts else ""
            ranks, pods = _plural(self.settings.world_size, "rank"), _plural(self.settings.pods, "pod")
            cause = go.history[-2].failure if len(go.history) > 1 else None
            after = f", after {cause.summary}" if cause else ""
            self.say(f"attempt {go.number + 1}{of}: {ranks} on {pods}{after}")
        for local_rank in range(self.settings.processes):
            self._start_rank(go, local_rank)

    def _start_rank(self, go: AttemptStarted, local_rank: int) -> None:
        settings = self.settings
        rank = settings.pod * settings.processes + local_rank
        count = self._count_lines
        tag = contract.RANK_PREFIX.format(rank=rank)
        pipes: dict[int, output.Prefixer | None] = {}
        ends = []
        for target in (output.Prefixer(tag, 1, count), output.Prefixer(tag, self.stderr, count), None):
            read, write = os.pipe()
            os.set_blocking(read, False)
            pipes[read] = target
            ends.append(write)
            self.selector.register(read, selectors.EVENT_READ)
        environment = variables.of_rank(settings, go, local_rank, self.errors)
        pid = self.server.launch(settings.command, environment, settings.work, *ends)
        for end in ends:
            os.close(end)
        self.ranks[pid] = Rank(rank, local_rank, pid, pipes)

    def _read(self, fd: int) -> None:
        for rank in self.ranks.values():
            if fd in rank.pipes:
                if not self._pump(rank, fd):
                    self._close(rank, fd)
                return

    def _pump(self, rank: Rank, fd: int) -> bool:
        """Pass on what a pipe holds; False at its end."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        target = rank.pipes[fd]
        if target:
            target.feed(data)
        else:
            rank.report += data
            if data.endswith(b"\n"):
                self._reported(rank)
        return bool(data)

    def _close(self, rank: Rank, fd: int) -> None:
        target = rank.pipes.pop(fd)
        if target:
            target.end()
        self.selector.unregister(fd)
        os.close(fd)

    def _reported(self, rank: Rank) -> None:
        """A rank says that it is about to end, and why. It tells before its connections break."""
        with contextlib.suppress(ValueError, TypeError):
            fields = json.loads(rank.report.splitlines()[-1])
            known = {
                name: fields[name]
                for name in ("kind", "type", "message", "traceback", "time", "secondary")
                if name in fields
            }
            if known.get("kind") == "exit":
                known["exit_code"] = 1
            self._failed(rank, replace(self._failure(rank, "exception"), **known))
            rank.kill_at = time.monotonic() + FINISH_AFTER

    def _rank_ended(self, pid: int, status: int) -> None:
        rank = self.ranks.get(pid)
        if rank is None:
            return
        for fd in list(rank.pipes):
            while self._pump(rank, fd) and _readable(fd):
                pass
            self._close(rank, fd)
        _kill_group(pid, signal.SIGKILL)  # what it may have left behind
        del self.ranks[pid]
        code = os.waitstatus_to_exitcode(status)
        if code < 0 and rank.failure is None:
            kind = "oom" if code == -signal.SIGKILL and host.memory_kills() > self.kills else "signal"
            self.kills = host.memory_kills()
            # A peer's end makes NCCL's watchdog abort the process.
            failure = replace(self._failure(rank, kind), signal=-code, secondary=-code == signal.SIGABRT)
            self._failed(rank, failure)
        elif code > 0 and rank.failure is None:
            self._failed(rank, replace(self._failure(rank, "exit"), exit_code=code))
        if not self.ranks and self.go and not self.ending and not self.failures and self.stopping is None:
            self.member.done(self.go)

    def _failed(self, rank: Rank, failure: Failure) -> None:
        if self.ending or self.stopping is not None or self.go is None:
            return  # it was told to end
        rank.failure = failure
        self.failures.append(failure)
        self.member.failed(self.go, failure)

    def _failure(self, rank: Rank | None, kind: str) -> Failure:
        settings = self.settings
        attempt = self.go.number if self.go else 0
        number = rank.rank if rank else None
        return Failure(kind, settings.pod, number, settings.pod_name, settings.node, attempt, time.time())

    # Ends -------------------------------------------------------------------------------------------------------

    def _end_ranks(self) -> None:
        """The attempt is over for everybody: end what still runs here."""
        self.ending = True
        for rank in self.ranks.values():
            if rank.failure is None:
                self._terminate(rank, signal.SIGTERM, KILL_AFTER)

    def _terminate(self, rank: Rank, number: int, patience: float) -> None:
        _kill_group(rank.pid, number)
        rank.kill_at = time.monotonic() + patience

    def _signalled(self, number: int) -> None:
        if self.stopping is not None:  # told twice
            for rank in self.ranks.values():
                _kill_group(rank.pid, signal.SIGKILL)
            return
        if self.go and not self.ending:
            name = signal.Signals(number).name
            self.member.failed(self.go, replace(self._failure(None, "lost"), message=f"received {name}"))
        self.stopping = number
        for rank in self.ranks.values():
            self._terminate(rank, number, self.settings.grace)

    def _check_clock(self) -> None:
        now = time.monotonic()
        for rank in self.ranks.values():
            if rank.kill_at is not None and now >= rank.kill_at:
                _kill_group(rank.pid, signal.SIGKILL)
                rank.kill_at = None
        deadline = self.settings.deadline
        if deadline and now - self.began >= deadline and self.go and not self.ending and not self.failures:
            failure = replace(self._failure(None, "deadline"), message=f"{deadline:g} s since the launcher started")
            self.failures.append(failure)
            self.member.failed(self.go, failure)

    def _timeout(self) -> float | None:
        """Seconds until the clock has to be looked at; none where a rank ended while others were being started."""
        if self.server.pending:
            return 0.0
        times = [rank.kill_at for rank in self.ranks.values() if rank.kill_at is not None]
        if self.settings.deadline and self.go and not self.ending and not self.failures:
            times.append(self.began + self.settings.deadline)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def server_died(self, error: ServerDiedError) -> int:
        """The ranks are gone with their parent. The other pods go on to the next attempt when this one is back."""
        kind = "oom" if host.memory_kills() > self.kills else "lost"
        message = f"lost its ranks: {error}" if kind == "lost" else str(error)
        failure = replace(self._failure(None, kind), message=message)
        if self.go:
            self.member.failed(self.go, failure)
        leave(self.settings, JobRecord("failed", failure.code, self.settings.restarts, failure))
        self.say(f"failed: {failure.summary}")
        return failure.code if self.settings.pods == 1 else 128 + signal.SIGKILL

    def _stopped(self, number: int) -> int:
        code = code_of_signal(number)
        self.say(f"told to stop by {signal.Signals(number).name}; all ranks of this pod have ended")
        leave(
            self.settings,
            JobRecord("preempted", code, self.settings.restarts, None, self.go.history if self.go else []),
        )
        return code

    def _finish(self, record: JobRecord) -> int:
        leave(self.settings, record)
        if self.leader:
            self._record(record)
            if record.failure:
                self.say(f"failed: {record.failure.summary}")
            self.leader.linger()
        return record.code

    # Records ----------------------------------------------------------------------------------------------------

    def _record(self, record: JobRecord) -> None:
        self.current = record
        self.say(contract.RECORD_MARKER + record.to_json())

    def _count_lines(self, lines: int) -> None:
        self.lines += lines
        if self.lines >= contract.RECORD_INTERVAL and self.leader:
            self.lines = 0
            self._record(self.current)


def leave(settings: Settings, record: JobRecord) -> None:
    """Write the record where the kubelet looks for it, so that it outlives the pod's log."""
    if settings.termination_log:
        with contextlib.suppress(OSError):
            Path(settings.termination_log).write_text(record.to_json(contract.TERMINATION_LOG_LIMIT))


def main(arguments: Sequence[str]) -> NoReturn:
    """Start the launcher with a command line; end the process with a code of the contract."""
    wakeup = Wakeup()
    wakeup.install()
    settings: Settings | None = None
    try:
        settings = Settings.read(arguments, os.environ)
        if settings.parent:
            host.die_with_parent(settings.parent, signal.SIGTERM)
        code = _launch(settings, wakeup)
    except (SettingsError, CodeError) as error:
        code = _refuse(settings, arguments, str(error))
    except BaseException:
        traceback.print_exc()
        code = ExitCode.ERROR
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the threads of the rendezvous may wait in C++ for a store that is gone


def _launch(settings: Settings, wakeup: Wakeup) -> int:
    if settings.code:
        unpack(Path(settings.code), Path(settings.work), settings.code_hash)
    script = None if settings.command[0] == "-m" else Path(settings.work, settings.command[0])
    if script and not script.is_file():
        raise SettingsError(f"no such script: {settings.command[0]} in {settings.work}")
    variables.prepare(settings, os.environ)
    if sys.path and sys.path[0] == os.getcwd():
        sys.path.pop(0)  # from `python -m flk_runtime`: a script does not have its working folder there
    host.adopt_orphans()
    try:
        if settings.fork:
            forkserver.preload(script, os.environ.get(contract.STRATEGY, ""))
        import torch.distributed  # noqa: F401 - the store of the rendezvous
    except ImportError as error:
        raise SettingsError(f"{sys.executable} cannot import torch: {error}") from error
    unsafe = forkserver.unsafe() if settings.fork else None
    server = ForkServer.start(fork=settings.fork and not unsafe)
    with (
        tempfile.TemporaryDirectory(prefix="flk-", ignore_cleanup_errors=True) as errors,
        output.stderr_set_aside(Path(errors, "launcher.log")) as stderr,
    ):
        launcher = Launcher(settings, wakeup, server, stderr, errors)
        if unsafe:
            launcher.say(
                f"ranks start as fresh interpreters instead of forks, because {unsafe} where torch was imported"
            )
        wakeup.starting = False
        try:
            return launcher.run()
        except ServerDiedError as error:
            return launcher.server_died(error)


def _refuse(settings: Settings | None, arguments: Sequence[str], message: str) -> int:
    pod = settings.pod if settings else 0
    write_all(2, f"{contract.LAUNCHER_PREFIX.format(index=pod)}error: {message}\n".encode())
    if settings is None:
        settings = Settings(tuple(arguments), termination_log=os.environ.get(contract.TERMINATION_LOG, ""))
    failure = Failure("usage", pod, None, settings.pod_name, settings.node, time=time.time(), message=message)
    leave(settings, JobRecord("failed", int(ExitCode.USAGE), settings.restarts, failure))
    return ExitCode.USAGE


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _readable(source: int | socket.socket) -> bool:
    """Whether a read would not wait: data, or the end."""
    poll = selectors.PollSelector()
    with poll:
        poll.register(source, selectors.EVENT_READ)
        return bool(poll.select(0))
