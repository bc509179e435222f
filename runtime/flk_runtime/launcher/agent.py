"""The launcher's loop: it starts the ranks of its pod for each attempt, watches them, and returns an exit code.

One thread handles everything in turn: signals, events of the rendezvous, ranks that end, their output and their
reports. The threads of the rendezvous only post events.
"""

from __future__ import annotations

import enum
import math
import os
import selectors
import signal
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from flk_runtime.contract import ExitCode, log_format, pod_env, pod_layout
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.quantities import plural
from flk_runtime.contract.record import SOURCES, Attempt, JobRecord
from flk_runtime.launcher.control import Control, ThreadFailed, Wakeup, start_thread
from flk_runtime.launcher.hangs.watch import Watch
from flk_runtime.launcher.preemption import NO_STEP, PodPreemption
from flk_runtime.launcher.processes.forkserver import ServerDiedError
from flk_runtime.launcher.processes.output import RankPipes
from flk_runtime.launcher.processes.ranks import RankProcess, Ranks
from flk_runtime.launcher.records.writer import RecordWriter
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry import health
from flk_runtime.launcher.transport import Member, Server, messages
from flk_runtime.launcher.transport.messages import AttemptStarted, Event
from flk_runtime.shared import failure_report
from flk_runtime.shared.progress import ProgressPage
from flk_runtime.system import host

if TYPE_CHECKING:
    from flk_runtime.launcher.processes.service import Service
    from flk_runtime.launcher.replication.service import MemoryService

TERMINATE_TIMEOUT = 1.0  # seconds between SIGTERM and SIGKILL at the end of an attempt: ranks hang in a collective
LAST_WAIT = 2.0  # seconds in which a launcher that has to stop exchanges its last messages with the leader
EXIT_TIMEOUT = 5.0  # seconds that a rank may take to end after it has reported an exception or written that it aborts


@dataclass
class PodAttempt:
    """One attempt as the launcher of one pod knows it. Each attempt has a new one."""

    started: AttemptStarted
    failures: list[Failure] = field(default_factory=list)  # of this pod
    clean_exits: list[Failure] = field(default_factory=list)  # code 0: reported as EARLY only if another rank fails
    step: int | None = None  # most steps that a rank of this pod that has ended had done
    begun: bool = False  # a rank has made a step, and the leader knows after which one the attempt began
    ranks_ended: bool = False  # all have, and the leader does not know yet
    grouped: bool = False  # a rank that has ended had opened a process group, or it is not known whether it had
    preemption: PodPreemption | None = None
    end: Failure | None = None  # why the attempt ended in all pods
    unprinted: list[tuple[RankPipes, str]] = field(default_factory=list)  # ranks' tracebacks of secondary failures

    @property
    def history(self) -> list[Attempt]:
        """The latest attempts of the job, this one included."""
        return self.started.history

    @property
    def suspicious(self) -> bool:
        """Whether a broken node, or its network, may have ended the attempt."""
        return any(failure.kind.suspicious for failure in (*self.failures, self.end) if failure)

    def print_secondary(self) -> None:
        """Print tracebacks of secondary failures if the attempt has ended without another cause.

        Otherwise they are consequences: of the failure of another rank, or of ranks that launchers have ended.
        """
        if self.end and self.end.secondary:
            for pipes, text in self.unprinted:
                pipes.write_stderr(text)
            self.unprinted.clear()

    def end_rank(self, page: ProgressPage) -> None:
        """Note how far the rank with this page had come when it ended."""
        self.grouped = self.grouped or page.grouped >= 0
        if page.step >= 0:
            self.step = max(self.step or 0, page.step)

    def judge_terminated(self, failure: Failure) -> Failure:
        """The failure of a rank that the launcher had told to end: STOPPED, if SIGTERM is probably why it failed.

        SIGTERM is not why, if another rank has failed in the same way.
        """
        known = [*self.failures, self.end] if self.end else self.failures
        alike = any(failure.signature == each.signature for each in known)
        answers = failure.kind.meaning.answers_sigterm and not alike
        return replace(failure, kind=Kind.STOPPED) if answers else failure

    def stopped_as_told(self, page: ProgressPage, code: int) -> bool:
        """Whether the rank with this page has ended with this code because it was told to save and end."""
        return code == ExitCode.PREEMPTED and self.preemption is not None and self.preemption.stopped(page)


class _Phase(enum.Enum):
    """The phase of the launcher's loop.

    RUNNING follows JOINING when the leader starts an attempt. ENDING follows when the attempt is over in all pods, the
    leader is lost, or the job has ended. When the ranks of this pod have ended, JOINING follows, or the loop ends.
    """

    JOINING = enum.auto()  # no rank runs; an attempt follows, or the end of the job
    RUNNING = enum.auto()  # an attempt runs; the ranks of this pod may have ended
    ENDING = enum.auto()  # the attempt or the job is over in all pods, and the ranks of this pod are being ended


@dataclass
class _Stop:
    """The signal that stops this launcher, in any phase. The launcher does not join again, and ends after its ranks."""

    signal: int
    at: float  # time by which the launcher ends, also if other pods have not; time.monotonic

    @property
    def by_user(self) -> bool:
        """Whether it is Ctrl-C, after which nothing is saved."""
        return self.signal == signal.SIGINT


class Agent:
    """The launcher of one pod."""

    def __init__(
        self,
        settings: Settings,
        wakeup: Wakeup,
        records: RecordWriter,
        ranks: Ranks,
        member: Member,
        watch: Watch,
        control: Control,
        *,
        rendezvous: Server | None = None,
        memory: MemoryService | None = None,
        service: Service | None = None,
    ) -> None:
        """All parts are ready, see `flk_runtime.launcher.start`. ``rendezvous`` is None where another pod leads."""
        self.settings = settings
        self.wakeup = wakeup
        self.records = records
        self.ranks = ranks
        self.member = member
        self.watch = watch
        self.control = control
        self.rendezvous = rendezvous
        self.memory = memory
        self.service = service
        self.phase = _Phase.JOINING
        self.attempt: PodAttempt | None = None  # the latest one
        self.stop: _Stop | None = None
        self.final_record: JobRecord | None = None  # of a job that has ended
        self.deadline = time.monotonic() + settings.seconds_left(time.time())

    def run(self) -> int:
        """Run attempts until the job ends or a signal stops this launcher. Returns the exit code."""
        selector, server = self.ranks.selector, self.ranks.server
        selector.register(self.wakeup.socket, selectors.EVENT_READ)
        selector.register(server.connection, selectors.EVENT_READ)
        if self.rendezvous:
            self.rendezvous.start()
        self.member.start()
        code = None
        while code is None:
            for key, _ in selector.select(self._select_timeout()):
                if key.fileobj is self.wakeup.socket:
                    self.wakeup.clear()
                    self.ranks.pause_or_resume()
                elif rank := self.ranks.read(int(key.fd)):
                    self._handle_report(rank)
            while server.pending:
                exited = server.ended()
                self._handle_rank_exit(exited.pid, exited.status)
            while self.wakeup.signals:
                self._handle_signal(self.wakeup.signals.pop(0))
            while self.final_record is None and not self.wakeup.events.empty():
                self._handle_event(self.wakeup.events.get())
            self._handle_timeouts()
            host.reap_orphans(lambda: [server.pid, *(self.service.pids() if self.service else ())])
            code = self._go_on()
        return code

    def _go_on(self) -> int | None:
        """When no process of this pod's ranks is left: join the next attempt, or return the launcher's exit code."""
        attempt, ended = self.attempt, self.phase is _Phase.ENDING
        if self.ranks or not (ended or self.stop) or not self.ranks.orphans_have_ended():
            return None
        if self.final_record:
            return self._finish(self.final_record)
        if self.stop:
            saving = self._running and self._running.preemption  # until the ranks of all pods have ended: pod 0 leads
            return None if saving and not self._overdue else self._finish_stopped(self.stop)
        if attempt:
            self.phase = _Phase.JOINING
            self._join_next_round(attempt)
        return None

    def _join_next_round(self, attempt: PodAttempt) -> None:
        """Join the next attempt. If a broken node may have ended this one, the health of this pod is checked before."""

        def join() -> None:
            found = health.check(self.settings, attempt.started.number) if attempt.suspicious else []
            if not self.stop:  # meanwhile
                # Clean exits too: a rank that ends early breaks others' connections.
                self.member.join_next_round([*attempt.failures, *attempt.clean_exits, *found], attempt.step)

        if attempt.suspicious:
            start_thread("health", join, self.wakeup.post)
        else:
            join()

    # Events of the rendezvous ------------------------------------------------------------------------------------

    def _handle_event(self, event: Event) -> None:
        running = self._running
        match event:
            case messages.AttemptStarted():
                self._start_attempt(event)
            case messages.PreemptionStarted() if running:
                if running.preemption is None:
                    running.preemption = PodPreemption([rank.progress for rank in self.ranks], time.monotonic())
                    if self.rendezvous:
                        self.records.log(f"{event.failure.summary}; all ranks have to end")
                if event.urgent:
                    self.ranks.end(self.settings.grace)
            case messages.SaveAt() if running and running.preemption:
                self._stop_ranks(running.preemption, event.step)
            case messages.AttemptEnded() if running:
                self._end_in_ledger(event.failure)
                running.end = event.failure
                running.print_secondary()
                self._end_ranks()
                if self.rendezvous:
                    # The cause is chosen when all pods have reported. The line of the next attempt names it.
                    cause = "" if event.failure.secondary else f": {event.failure.summary}"
                    self.records.log(f"attempt {running.started.number + 1} ended{cause}")
            case messages.LeaderLost() if running:
                self._end_in_ledger(event.failure)
                running.failures.append(event.failure)
                self._end_ranks()
            case messages.StacksRequested():
                self.watch.take_stacks(event.number)
            case messages.Reply():
                self.control.answer(event.asker, event.content)
            case messages.WaitsChanged():
                self.records.write_waits(event.slow, event.standstill)
            case messages.JobEnded():
                self.final_record = event.record
                if self.records.ledger:
                    self.records.ledger.close(time.monotonic(), failed=event.record.outcome == "failed")
                self._end_ranks()
            case ThreadFailed():
                raise event.error

    def _start_attempt(self, attempt: messages.AttemptStarted) -> None:
        self.phase, self.attempt = _Phase.RUNNING, PodAttempt(attempt)
        if self.stop:
            return
        settings = self.settings
        self.records.log(f"{log_format.ATTEMPT_MARKER}{attempt.number + 1}")  # of what the later lines belong to
        if self.rendezvous:
            self.records.write_running(attempt.history)
            size = f"{plural(len(attempt.pods) * settings.processes, 'rank')} on {plural(len(attempt.pods), 'pod')}"
            cause = attempt.history[-2].failure if len(attempt.history) > 1 else None
            reason = f", after {cause.summary}" if cause else ""
            self.records.log(f"attempt {attempt.number + 1}: {size}{reason}")
        variables: dict[str, str] = {}
        if self.memory:
            self.memory.start(attempt.number, attempt.memory, attempt.pods, attempt.readers)
            variables = {pod_env.MEMORY: self.memory.socket} if attempt.memory else {}
        try:
            self.ranks.start(attempt, variables)
        except OSError as error:  # no room for their files, or no descriptors
            found = failure_report.describe(error)
            failure = replace(self.ranks.new_failure(Kind(found.pop("kind"))), **found)
            self._fail(self.attempt, replace(failure, message=f"its ranks cannot start: {failure.message}"))
            return
        if self.records.ledger:
            self.records.ledger.start_attempt(next(iter(self.ranks)).progress, time.monotonic())

    def _end_in_ledger(self, failure: Failure) -> None:
        if self.records.ledger:
            failed, hung = not failure.kind.meaning.saves, failure.kind is Kind.HANG
            self.records.ledger.end_attempt(time.monotonic(), failed=failed, hung=hung)

    def _end_ranks(self) -> None:
        """End the ranks of this pod, because the attempt or the job is over in all pods."""
        self.phase = _Phase.ENDING
        if self.attempt and self.attempt.preemption:
            self.attempt.preemption.release()
        for rank in self.ranks:
            if rank.failure is not None or rank.terminated:
                continue  # it has been told to end, and has time for it
            if rank.crashing:
                rank.kill_at = time.monotonic() + EXIT_TIMEOUT
            else:
                rank.end(TERMINATE_TIMEOUT, signal.SIGTERM)

    def _stop_ranks(self, preemption: PodPreemption, step: int) -> None:
        """Have the ranks save after ``step`` and end, or send them SIGTERM, as the leader has decided."""
        if self.rendezvous:
            signaled = "all ranks get SIGTERM, since not every rank has made a step after which flk could save"
            self.records.log(signaled if step == NO_STEP else f"all ranks stop after step {step} to save")
        if step == NO_STEP:
            preemption.release()
            self.ranks.end(self.settings.grace, self.stop.signal if self.stop else signal.SIGTERM)
        else:
            preemption.stop_at(step)

    # Ranks -------------------------------------------------------------------------------------------------------

    def _handle_report(self, rank: RankProcess) -> None:
        """Handle the rank's report of its exception, if it has sent one. It arrives before its connections break."""
        reported = self.ranks.report_of(rank)
        if reported and self.attempt:
            failure, unprinted = reported
            if unprinted:
                self.attempt.unprinted.append((rank.pipes, unprinted))
                self.attempt.print_secondary()
            self._handle_failure(rank, failure)
            rank.kill_at = time.monotonic() + EXIT_TIMEOUT

    def _handle_rank_exit(self, pid: int, status: int) -> None:
        attempt = self.attempt
        if attempt and not attempt.begun:
            self._report_restored(attempt)  # a rank may end as soon as it has begun
        rank = self.ranks.remove(pid)
        if rank is None or attempt is None:
            return
        self._handle_report(rank)
        attempt.end_rank(rank.progress)
        self.records.keep_steps(rank.progress)
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and not rank.terminated:
            attempt.clean_exits.append(self.ranks.failure_of_exit(rank, 0))
        elif code != 0 and rank.failure is None and not attempt.stopped_as_told(rank.progress, code):
            self._handle_failure(rank, self.ranks.failure_of_exit(rank, code))
        attempt.ranks_ended = not self.ranks

    def _report_end_of_ranks(self, attempt: PodAttempt) -> None:
        """Tell the leader that all ranks of this pod have ended, unless one has failed.

        If they have saved to end, the partner must have its copies first: the memory of this pod may be gone soon.
        """
        if not attempt.failures and len(attempt.clean_exits) == self.settings.processes:
            self.member.send(messages.SuccessReport(attempt.started.number, attempt.grouped))
        elif not attempt.failures and attempt.preemption:
            if self.memory and self.memory.busy and not self._overdue:
                return
            self.member.send(messages.RanksEnded(attempt.started.number, attempt.preemption.saved))
        attempt.ranks_ended = False

    def _handle_failure(self, rank: RankProcess, failure: Failure) -> None:
        attempt = self.attempt
        if attempt is None or (self.stop and self.stop.by_user) or rank.ended_by_launcher(failure):
            return  # the launcher has ended this rank
        rank.failure = attempt.judge_terminated(failure) if rank.terminated else failure
        if rank.terminated and attempt.preemption:
            return  # a rank may end in any way after SIGTERM: the attempt ends when all have
        self._fail(attempt, rank.failure)

    def _fail(self, attempt: PodAttempt, failure: Failure) -> None:
        """Note a failure of this pod, and report it to the leader while the attempt runs."""
        attempt.failures.append(failure)
        if self.phase is _Phase.RUNNING:
            self.member.send(messages.FailureReport(attempt.started.number, failure))

    # Signals and timeouts ----------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        if self.stop:
            if number == signal.SIGINT:  # Ctrl-C again; the kubelet may repeat SIGTERM, while the ranks save
                self.ranks.end(0.0)
            return
        now, running = time.monotonic(), self._running
        self.stop = _Stop(number, now if number == signal.SIGINT else now + self.settings.grace + LAST_WAIT)
        if running is None or not self.ranks:
            return
        message = f"received {signal.Signals(number).name}"
        if self.stop.by_user:
            failure = replace(self.ranks.new_failure(Kind.LOST), message=message)
            self.member.send(messages.FailureReport(running.started.number, failure))
            self.ranks.end(min(self.settings.grace, pod_layout.INTERRUPT_GRACE), number)
        else:
            self.ranks.end(self.settings.grace)
            failure = replace(self.ranks.new_failure(Kind.PREEMPTED), message=message)
            self.member.send(messages.PreemptionRequest(running.started.number, failure))

    @property
    def _overdue(self) -> bool:
        return self.stop is not None and time.monotonic() >= self.stop.at

    def _handle_timeouts(self) -> None:
        self.ranks.kill_overdue()
        attempt = self.attempt
        if attempt is None:
            return
        for failure in self.ranks.abandon_unkillable():
            self._fail(attempt, failure)
        if self.phase is _Phase.RUNNING:
            self._watch_attempt(attempt)
        if not attempt.begun:
            self._report_restored(attempt)

    def _watch_attempt(self, attempt: PodAttempt) -> None:
        """Send the leader the reports of the running attempt that are due."""
        boundaries = attempt.preemption.boundaries(time.monotonic()) if attempt.preemption else None
        if boundaries is not None:
            self.member.send(messages.BoundaryReport(attempt.started.number, boundaries))
        if attempt.ranks_ended:
            self._report_end_of_ranks(attempt)
        if time.monotonic() >= self.watch.due:
            self.watch.update(attempt.started.number, self.ranks)
            self.records.keep_progress(self.watch.ranks, self.watch.usage)
        if not attempt.failures and time.monotonic() >= self.deadline:
            message = f"{self.settings.deadline:g} s since the job started"
            self._fail(attempt, replace(self.ranks.new_failure(Kind.DEADLINE), message=message))

    def _report_restored(self, attempt: PodAttempt) -> None:
        """Tell the leader after which step the ranks of this attempt began, if they say so.

        The step is the same in all pods. A script may correct it before its first step: it has a state of its own.
        """
        page = next((rank.progress for rank in self.ranks if rank.progress.restored >= 0), None)
        if page is None:
            return
        begun = page.step >= 0  # read first: what follows stays as it is then
        step, source = page.restored, SOURCES[page.restored_from]
        if (step, source) != (attempt.history[-1].restored, attempt.history[-1].restored_from):
            self.member.send(messages.Restored(attempt.started.number, step, source))
            attempt.history[-1] = replace(attempt.history[-1], restored=step, restored_from=source)
            if self.rendezvous:
                self.records.write_running(attempt.history)
        attempt.begun = begun
        if self.rendezvous and begun:
            reached = max((each.step or 0 for each in attempt.history[:-1]), default=0)
            if reached and step == 0:
                number = attempt.started.number + 1
                self.records.log(f"attempt {number} began at step 0 again; step {reached} had been reached before")

    def _select_timeout(self) -> float | None:
        """Seconds until the next timeout; 0 if a rank has ended while others were started, None without timeouts."""
        if self.ranks.server.pending:
            return 0.0
        times = [self.ranks.next_kill]
        if self.stop and not self.ranks:
            times.append(self.stop.at)
        if running := self._running:
            times += [self.watch.due, running.preemption.settled_at if running.preemption else None]
            times += [] if running.failures else [self.deadline]
        due = min((each for each in times if each is not None), default=math.inf)
        return None if due == math.inf else max(0.0, due - time.monotonic())

    @property
    def _running(self) -> PodAttempt | None:
        """The attempt that runs."""
        return self.attempt if self.phase is _Phase.RUNNING else None

    # The end -----------------------------------------------------------------------------------------------------

    def fail_without_server(self, error: ServerDiedError) -> int:
        """End this launcher after the fork server has died, and the ranks with it. Returns the exit code.

        To the leader this launcher was killed.
        """
        failure = self.ranks.failure_of_server(str(error))
        return self.records.finish_without_ranks(failure, self.attempt.history if self.attempt else [])

    def _finish_stopped(self, stop: _Stop) -> int:
        if not stop.by_user:
            self.member.send_last(messages.Stopping(), max(0.0, min(LAST_WAIT, stop.at - time.monotonic())))
        end, history = (self.attempt.end, self.attempt.history) if self.attempt else (None, [])
        return self.records.finish_stopped(stop.signal, end, history)

    def _finish(self, record: JobRecord) -> int:
        code = self.records.finish(record, leader=self.rendezvous is not None)
        if self.memory:
            self.memory.close(remove=record.outcome not in ("replaced", "preempted"))
        if self.rendezvous and record.outcome != "replaced":
            all_know = self.rendezvous.wait_for_members_to_leave(self.settings.lease, self.wakeup.signals)
            # The controller brings back a pod that was lost at the end, which learns only here that the job has
            # succeeded. If this pod ended before, that pod would wait for it, and fail the job.
            if (
                not all_know
                and record.outcome == "succeeded"
                and not self.stop
                and self.settings.least_pods == self.settings.pods
            ):
                self.records.log(
                    "the job has succeeded; waiting until the pods that were lost at its end are back and know it"
                )
                self.rendezvous.wait_for_members_to_leave(self.settings.join_timeout, self.wakeup.signals)
        if self.service:
            self.service.close(code)
        return code
