"""The launcher's loop: it starts the ranks of its pod for each attempt, watches them, and returns an exit code.

One thread handles everything in turn: signals, events of the rendezvous, ranks that end, their output and their
reports. The threads of the rendezvous only post events.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

from flk_runtime import contract
from flk_runtime.contract import Failure, JobRecord
from flk_runtime.launcher.environment import rank_environment
from flk_runtime.launcher.failures import from_exit_code, from_report, write_termination_message
from flk_runtime.launcher.forkserver import ForkServer, ServerDiedError
from flk_runtime.launcher.logs import Prefixer, RankPipes, is_readable
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
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import Wakeup, exit_code_of_signal
from flk_runtime.system import host
from flk_runtime.system.progress import ProgressPage
from flk_runtime.system.report import write_all
from flk_runtime.system.text import plural

TERMINATE_TIMEOUT = 1.0  # seconds between SIGTERM and SIGKILL at the end of an attempt: ranks hang in a collective
EXIT_TIMEOUT = 5.0  # seconds that a rank may run its exit handlers after it has reported an exception


@dataclass
class RankProcess:
    """A running rank."""

    rank: int
    pid: int
    pipes: RankPipes
    progress: ProgressPage
    failure: Failure | None = None
    kill_at: float | None = None  # time of SIGKILL, by time.monotonic
    terminated: bool = False  # the launcher has told it to end

    def terminate(self, number: int, timeout: float) -> None:
        """Send a signal to the rank; ``timeout`` seconds later, SIGKILL follows to it and to processes that it started.

        Only the rank gets the first signal: it may need the workers of its DataLoader while it saves.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, number)
        self.terminated = True
        self.kill_at = time.monotonic() + timeout

    def kill(self) -> None:
        """Send SIGKILL to the rank and to the processes that it has started, unless all have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Agent:
    """The launcher of one pod."""

    def __init__(self, settings: Settings, wakeup: Wakeup, server: ForkServer, stderr: int, error_folder: str) -> None:
        """``stderr`` is the descriptor of the real stderr; ``error_folder`` is for files of the ranks."""
        self.settings = settings
        self.wakeup = wakeup
        self.server = server
        self.stderr = stderr
        self.error_folder = error_folder
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.selector.register(wakeup.socket, selectors.EVENT_READ)
        self.selector.register(server.socket, selectors.EVENT_READ)
        self.ranks: dict[int, RankProcess] = {}  # by process id
        self.attempt: AttemptStarted | None = None
        self.attempt_over = False  # it ended for all pods; this pod's ranks are being terminated
        self.failures: list[Failure] = []  # of this pod in this attempt
        self.finished: list[Failure] = []  # its ranks that ended with code 0, which is a failure only if others fail
        self.stop_signal: int | None = None  # the signal that stops this launcher
        self.final_record: JobRecord | None = None
        self.latest_record: JobRecord | None = None
        self.lines = 0  # of the ranks, since the latest record was written
        self.oom_kills = host.oom_kills()
        self.leader = Leader(settings, wakeup.post, self.log) if settings.pod == 0 else None
        port = self.leader.port if self.leader else settings.store_port
        self.member = Member(settings, port, wakeup.post, self.log)

    def log(self, text: str) -> None:
        """Write a line of the launcher's own to stderr."""
        prefix = contract.LAUNCHER_PREFIX.format(index=self.settings.pod)
        write_all(self.stderr, f"{prefix}{text}\n".encode(errors="replace"))

    def run(self) -> int:
        """Run attempts until the job ends or a signal stops this launcher. Returns the exit code."""
        if self.leader:
            self.leader.start()
        self.member.start()
        while True:
            rank_ended = False
            for key, _ in self.selector.select(self._select_timeout()):
                if key.fileobj is self.wakeup.socket:
                    self.wakeup.clear()
                elif key.fileobj is self.server.socket:
                    rank_ended = True
                else:
                    self._read_pipe(int(key.fd))
            while self.server.pending or (rank_ended and is_readable(self.server.socket.fileno())):
                exited = self.server.ended()
                self._handle_rank_exit(exited.pid, exited.status)
            while self.wakeup.signals:
                self._handle_signal(self.wakeup.signals.pop(0))
            while self.final_record is None and not self.wakeup.events.empty():
                self._handle_event(self.wakeup.events.get())
            self._handle_timeouts()
            host.reap_orphans()
            if not self.ranks:
                if self.stop_signal is not None:
                    return self._finish_stopped(self.stop_signal)
                if self.final_record:
                    return self._finish(self.final_record)
                if self.attempt_over:
                    self.attempt_over, self.attempt = False, None
                    # A rank that ends early with success breaks the connections of the others.
                    self.member.join_next_round([*self.failures, *self.finished])

    # Events of the rendezvous ------------------------------------------------------------------------------------

    def _handle_event(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self._start_attempt(event)
            case AttemptEnded():
                self._terminate_ranks()
                if self.leader and self.attempt and event.failure:
                    # The cause is chosen when all pods have reported. The line of the next attempt names it.
                    cause = "" if event.failure.secondary else f": {event.failure.summary}"
                    self.log(f"attempt {self.attempt.number + 1} ended{cause}")
            case LeaderLost():
                self.failures.append(event.failure)
                self._terminate_ranks()
            case JobEnded():
                self.final_record = event.record
                self._terminate_ranks()
            case ThreadFailed():
                raise event.error

    def _start_attempt(self, attempt: AttemptStarted) -> None:
        self.attempt, self.failures, self.finished, self.attempt_over = attempt, [], [], False
        if self.stop_signal is not None:
            return
        settings = self.settings
        if self.leader:
            self._write_record(JobRecord("running", 0, settings.restarts, None, attempt.history))
            limit = f" of at most {settings.restarts + 1}" if settings.restarts else ""
            size = f"{plural(settings.world_size, 'rank')} on {plural(settings.pods, 'pod')}"
            cause = attempt.history[-2].failure if len(attempt.history) > 1 else None
            reason = f", after {cause.summary}" if cause else ""
            self.log(f"attempt {attempt.number + 1}{limit}: {size}{reason}")
        for local_rank in range(settings.processes):
            self._start_rank(attempt, local_rank)

    def _terminate_ranks(self) -> None:
        """End the ranks of this pod, because the attempt is over in all pods."""
        self.attempt_over = True
        if self.stop_signal is not None:
            return  # they have been told to end, and have the grace period for it
        for rank in self.ranks.values():
            if rank.failure is None:
                rank.terminate(signal.SIGTERM, TERMINATE_TIMEOUT)

    # Ranks -------------------------------------------------------------------------------------------------------

    def _start_rank(self, attempt: AttemptStarted, local_rank: int) -> None:
        settings = self.settings
        rank = settings.rank(local_rank)
        prefix = contract.RANK_PREFIX.format(rank=rank)
        pipes = RankPipes(Prefixer(prefix, 1, self._count_lines), Prefixer(prefix, self.stderr, self._count_lines))
        for fd in pipes.read_ends:
            self.selector.register(fd, selectors.EVENT_READ)
        environment = rank_environment(settings, attempt, local_rank, self.error_folder)
        page = ProgressPage.create(Path(environment[contract.PROGRESS]))
        pid = self.server.launch(settings.command, environment, settings.work, *pipes.write_ends)
        pipes.close_write_ends()
        self.ranks[pid] = RankProcess(rank, pid, pipes, page)

    def _read_pipe(self, fd: int) -> None:
        rank = next((rank for rank in self.ranks.values() if fd in rank.pipes.read_ends), None)
        if rank is None:
            return
        if not rank.pipes.read(fd):
            self.selector.unregister(fd)
            rank.pipes.close(fd)
        self._handle_report(rank)

    def _handle_report(self, rank: RankProcess) -> None:
        """Handle the rank's report of its exception, if it has sent one. It arrives before its connections break."""
        report = rank.pipes.take_report()
        failure = from_report(self._new_failure(rank, "exception"), report) if report is not None else None
        if failure:
            self._handle_failure(rank, failure)
            rank.kill_at = time.monotonic() + EXIT_TIMEOUT

    def _handle_rank_exit(self, pid: int, status: int) -> None:
        rank = self.ranks.get(pid)
        if rank is None:
            return
        for fd in rank.pipes.read_ends:
            self.selector.unregister(fd)
            rank.pipes.read_rest_and_close(fd)
        self._handle_report(rank)
        rank.kill()  # ends the processes that it started and left
        del self.ranks[pid]
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and not rank.terminated:
            self.finished.append(from_exit_code(self._new_failure(rank, "exit"), 0, "", oom=False))
        elif code != 0 and rank.failure is None:
            oom_kills = host.oom_kills()
            failure = self._new_failure(rank, "exit")
            failure = from_exit_code(failure, code, rank.pipes.stderr_tail, oom=oom_kills > self.oom_kills)
            if code < 0:
                self.oom_kills = oom_kills
            self._handle_failure(rank, failure)
        attempt = self._healthy_attempt()
        if attempt and not self.ranks and self.stop_signal is None:
            self.member.report_success(attempt)

    def _handle_failure(self, rank: RankProcess, failure: Failure) -> None:
        if self.stop_signal is not None or self.attempt is None or _is_own_signal(rank, failure):
            return  # the launcher has ended this rank
        if rank.terminated and failure.kind in ("exception", "exit"):
            failure = replace(failure, secondary=True)  # probably how the script answers SIGTERM
        rank.failure = failure
        self.failures.append(failure)
        if not self.attempt_over:
            self.member.report_failure(self.attempt, failure)

    def _new_failure(self, rank: RankProcess | None, kind: str) -> Failure:
        settings = self.settings
        number = self.attempt.number if self.attempt else 0
        return Failure(
            kind, settings.pod, rank.rank if rank else None, settings.pod_name, settings.node, number, time.time()
        )

    # Signals and timeouts ----------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        if self.stop_signal is not None:  # the second signal ends the ranks at once
            for rank in self.ranks.values():
                rank.kill()
            return
        if self.attempt and not self.attempt_over:
            message = f"received {signal.Signals(number).name}"
            self.member.report_failure(self.attempt, replace(self._new_failure(None, "lost"), message=message))
        self.stop_signal = number
        for rank in self.ranks.values():
            rank.terminate(number, self.settings.grace)

    def _handle_timeouts(self) -> None:
        now = time.monotonic()
        for rank in self.ranks.values():
            if rank.kill_at is not None and now >= rank.kill_at:
                rank.kill()
                rank.kill_at = None
        attempt, deadline = self._healthy_attempt(), self.settings.deadline
        if attempt and deadline and now - self.started >= deadline:
            message = f"{deadline:g} s since the launcher started"
            failure = replace(self._new_failure(None, "deadline"), message=message)
            self.failures.append(failure)
            self.member.report_failure(attempt, failure)

    def _select_timeout(self) -> float | None:
        """Seconds until the next timeout; 0 if a rank has ended while others were started, None without timeouts."""
        if self.server.pending:
            return 0.0
        times = [rank.kill_at for rank in self.ranks.values() if rank.kill_at is not None]
        if self.settings.deadline and self._healthy_attempt():
            times.append(self.started + self.settings.deadline)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _healthy_attempt(self) -> AttemptStarted | None:
        """The attempt, if it is running and nothing has failed in this pod."""
        return None if self.attempt_over or self.failures else self.attempt

    # The end -----------------------------------------------------------------------------------------------------

    def fail_without_server(self, error: ServerDiedError) -> int:
        """End this launcher after the fork server has died, and the ranks with it. Returns the exit code.

        With several pods the code makes the operator start this pod again, for the next attempt.
        """
        kind = "oom" if host.oom_kills() > self.oom_kills else "lost"
        message = str(error) if kind == "oom" else f"lost its ranks: {error}"
        failure = replace(self._new_failure(None, kind), message=message)
        if self.attempt:
            self.member.report_failure(self.attempt, failure)
        record = JobRecord("failed", failure.code, self.settings.restarts, failure)
        write_termination_message(self.settings.termination_log, record)
        self.log(f"failed: {failure.summary}")
        return failure.code if self.settings.pods == 1 else 128 + signal.SIGKILL

    def _finish_stopped(self, number: int) -> int:
        code = exit_code_of_signal(number)
        self.log(f"received {signal.Signals(number).name}; all ranks of this pod have ended")
        history = self.attempt.history if self.attempt else []
        record = JobRecord("preempted", code, self.settings.restarts, None, history)
        write_termination_message(self.settings.termination_log, record)
        return code

    def _finish(self, record: JobRecord) -> int:
        write_termination_message(self.settings.termination_log, record)
        if self.leader:
            self._write_record(record)
            if record.failure:
                self.log(f"failed: {record.failure.summary}")
            self.leader.wait_for_members_to_leave()
        return record.code

    # Records in the log ------------------------------------------------------------------------------------------

    def _write_record(self, record: JobRecord) -> None:
        self.latest_record = record
        self.log(contract.RECORD_MARKER + record.to_json())

    def _count_lines(self, lines: int) -> None:
        """Count lines of the ranks, and repeat the record so that a tail of the log contains it."""
        self.lines += lines
        if self.lines >= contract.RECORD_INTERVAL and self.latest_record:
            self.lines = 0
            self._write_record(self.latest_record)


def _is_own_signal(rank: RankProcess, failure: Failure) -> bool:
    """Return whether the rank ended by the launcher's own SIGTERM or SIGKILL."""
    by_signal = failure.kind == "signal" and failure.signal in (signal.SIGTERM, signal.SIGKILL)
    return rank.terminated and (by_signal or failure.exit_code == 128 + signal.SIGTERM)
