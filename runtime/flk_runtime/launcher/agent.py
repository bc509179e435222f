"""The launcher's loop: it starts the ranks of its pod for each attempt, watches them, and returns an exit code.

One thread handles everything in turn: signals, events of the rendezvous, ranks that end, their output and their
reports. The threads of the rendezvous only post events.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from dataclasses import replace

from flk_runtime.contract import pod_env
from flk_runtime.contract.exit_codes import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.pod_layout import INTERRUPT_GRACE
from flk_runtime.contract.ranges import plural
from flk_runtime.contract.record import SOURCES, JobRecord
from flk_runtime.launcher import coordinator
from flk_runtime.launcher.forkserver import ForkServer, ServerDiedError
from flk_runtime.launcher.hangs.control import Control
from flk_runtime.launcher.hangs.watch import Watch
from flk_runtime.launcher.hub import HubProcess
from flk_runtime.launcher.logs import is_readable
from flk_runtime.launcher.output import Output
from flk_runtime.launcher.preemption import NO_STEP, PodPreemption
from flk_runtime.launcher.ranks import RankProcess, Ranks
from flk_runtime.launcher.records import Records
from flk_runtime.launcher.replication import MemoryService
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.signals import STACKS_SIGNAL, Wakeup
from flk_runtime.launcher.transport import (
    AttemptEnded,
    AttemptStarted,
    Event,
    JobEnded,
    LeaderLost,
    Member,
    PreemptionStarted,
    Release,
    SaveAt,
    SlowRanksChanged,
    StacksGathered,
    StacksRequested,
    ThreadFailed,
    Transfer,
)
from flk_runtime.system import host

TERMINATE_TIMEOUT = 1.0  # seconds between SIGTERM and SIGKILL at the end of an attempt: ranks hang in a collective
ORPHANS_TIMEOUT, ORPHANS_POLL = 5.0, 0.005  # seconds for processes that ranks have left to end after SIGKILL
LAST_WAIT = 2.0  # seconds in which a launcher that has to stop exchanges its last messages with the leader
EXIT_TIMEOUT = 5.0  # seconds that a rank may take to end after it has reported an exception or written that it aborts
# Kinds of failures that are probably how a script answers SIGTERM.
_ANSWERS = (Kind.EXCEPTION, Kind.EXIT, Kind.USAGE, Kind.MISMATCH, Kind.STORAGE)


class Agent:
    """The launcher of one pod."""

    def __init__(
        self, settings: Settings, wakeup: Wakeup, server: ForkServer, output: Output, error_folder: str
    ) -> None:
        """``error_folder`` is for files of the ranks."""
        self.settings = settings
        self.wakeup = wakeup
        self.server = server
        self.started = time.monotonic()
        self.selector = selectors.DefaultSelector()
        self.selector.register(wakeup.socket, selectors.EVENT_READ)
        self.selector.register(server.socket, selectors.EVENT_READ)
        self.records = Records(settings, output.write_stderr, output.last_lines)
        self.hub = HubProcess(settings, os.environ, self.records.log) if settings.hub_port else None
        self.ranks = Ranks(settings, server, self.selector, output, error_folder, self.records.count_lines, self.hub)
        self.attempt: AttemptStarted | None = None
        self.attempt_over = False  # it ended for all pods; this pod's ranks are being terminated
        self.failures: list[Failure] = []  # of this pod in this attempt
        self.step: int | None = None  # most steps that a rank of this pod that has ended had done in this attempt
        self.saved: bool | None = None  # a rank of this pod has saved through flk, or restored; None: none has ended
        self.restored = False  # the leader knows where this attempt began
        self.report_due = False  # all ranks have ended, and the leader does not know yet
        self.finished: list[Failure] = []  # its ranks that ended with code 0, which is a failure only if others fail
        self.stop_signal: int | None = None  # the signal that stops this launcher
        self.stop_at = 0.0  # time by which it stops, also if other pods have not ended; time.monotonic
        self.draining: bool | None = None  # the leader has not released this launcher yet; None: it was not asked
        self.preemption: PodPreemption | None = None  # of this attempt
        self.end: Failure | None = None  # why the attempt ended
        self.final_record: JobRecord | None = None
        self.orphans_until: float | None = None  # processes that the ranks have left are ending; time.monotonic
        self.rendezvous = None
        if settings.pod == 0:
            self.rendezvous = coordinator.serve(settings, wakeup.post, self.records.log, self.records.former())
        port = self.rendezvous.port if self.rendezvous else settings.rendezvous_port
        self.memory = MemoryService.open(
            settings,
            wake=wakeup.wake,
            failed=lambda error: wakeup.post(ThreadFailed(error)),
            log=self.records.log,
        )
        inventory = self.memory.inventory if self.memory else lambda: None
        self.member = Member(settings, port, wakeup.post, self.records.log, inventory)
        self.control = Control(error_folder, self.member.want_stacks, self.records.log)
        self.watch = Watch(settings, self.member.post_status, self.member.report_stacks)

    def run(self) -> int:
        """Run attempts until the job ends or a signal stops this launcher. Returns the exit code."""
        if self.rendezvous:
            self.rendezvous.start()
        self.member.start()
        while True:
            rank_ended = False
            for key, _ in self.selector.select(self._select_timeout()):
                if key.fileobj is self.wakeup.socket:
                    self.wakeup.clear()
                    self.ranks.pause_or_resume()
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
            if not self.ranks and self._orphans_have_ended():
                if self.final_record:
                    return self._finish(self.final_record)
                if self.stop_signal is not None and not self._must_wait():
                    history = self.attempt.history if self.attempt else []
                    return self.records.finish_stopped(self.stop_signal, self.end, history)
                if self.attempt_over and self.stop_signal is None:
                    self.attempt_over, self.attempt, self.preemption = False, None, None
                    # A rank that ends early with success breaks the connections of the others.
                    self.member.join_next_round([*self.failures, *self.finished], self.step)

    # Events of the rendezvous ------------------------------------------------------------------------------------

    def _handle_event(self, event: Event) -> None:
        match event:
            case AttemptStarted():
                self._start_attempt(event)
            case PreemptionStarted() if self.attempt and not self.attempt_over:
                if self.preemption is None:
                    self.preemption = PodPreemption([rank.progress for rank in self.ranks], time.monotonic())
                if event.urgent:
                    self.ranks.kill_within(self.settings.grace)
                if self.rendezvous:
                    self.records.log(f"{event.failure.summary}; all ranks have to end")
            case SaveAt() if self.preemption and not self.attempt_over:
                self._stop_ranks(self.preemption, event.step)
            case Transfer() if self.memory:
                self.memory.transfer(event.pod, (event.host, event.port), event.shards, self.member.report_transferred)
            case Release():
                self.draining = False
            case AttemptEnded():
                self.end = event.failure
                self._terminate_ranks()
                if self.rendezvous and self.attempt and event.failure:
                    # The cause is chosen when all pods have reported. The line of the next attempt names it.
                    cause = "" if event.failure.secondary else f": {event.failure.summary}"
                    self.records.log(f"attempt {self.attempt.number + 1} ended{cause}")
            case LeaderLost():
                self.failures.append(event.failure)
                self._terminate_ranks()
            case StacksRequested():
                self.watch.take_stacks(event.number)
            case StacksGathered():
                self.control.answer(event.asker, event.report)
            case SlowRanksChanged():
                self.records.write_slow(event.slow)
            case JobEnded():
                self.final_record = event.record
                self._terminate_ranks()
            case ThreadFailed():
                raise event.error

    def _start_attempt(self, attempt: AttemptStarted) -> None:
        self.attempt, self.failures, self.finished, self.attempt_over = attempt, [], [], False
        self.step, self.restored, self.report_due = None, False, False
        self.preemption = self.end = None
        if self.stop_signal is not None:
            return
        settings = self.settings
        self.records.mark_attempt(attempt.number + 1)
        if self.rendezvous:
            self.records.write_running(attempt.history)
            size = f"{plural(attempt.pods * settings.processes, 'rank')} on {plural(attempt.pods, 'pod')}"
            cause = attempt.history[-2].failure if len(attempt.history) > 1 else None
            reason = f", after {cause.summary}" if cause else ""
            if self.saved is False and not (attempt.memory and attempt.memory.restore):
                reason += (
                    "; no rank has saved through flk, so it begins at step 0 unless the script finds a state itself"
                )
            self.records.log(f"attempt {attempt.number + 1}: {size}{reason}")
        variables: dict[str, str] = {}
        if self.memory:
            first = attempt.rank(settings.processes, 0)
            self.memory.start(attempt.number, attempt.memory, range(first, first + settings.processes))
            variables = {pod_env.MEMORY: self.memory.socket} if attempt.memory else {}
        self.ranks.start(attempt, variables)

    def _terminate_ranks(self) -> None:
        """End the ranks of this pod, because the attempt is over in all pods."""
        self.attempt_over = True
        if self.preemption:
            self.preemption.release()
        for rank in self.ranks:
            if rank.failure is not None or rank.terminated:
                continue  # it has been told to end, and has time for it
            if rank.crashing:
                rank.kill_at = time.monotonic() + EXIT_TIMEOUT
            else:
                rank.terminate(signal.SIGTERM, TERMINATE_TIMEOUT)

    def _stop_ranks(self, preemption: PodPreemption, step: int) -> None:
        """Have the ranks save after ``step`` and end, or send them SIGTERM, as the leader has decided."""
        if self.rendezvous:
            signaled = "all ranks get SIGTERM, since not every rank has made a step after which flk could save"
            self.records.log(signaled if step == NO_STEP else f"all ranks stop after step {step} to save")
        if step == NO_STEP:
            preemption.release()
            self.ranks.kill_within(self.settings.grace)
            self.ranks.terminate_within_grace(self.stop_signal or signal.SIGTERM)
        else:
            preemption.stop_at(step)

    # Ranks -------------------------------------------------------------------------------------------------------

    def _read_pipe(self, fd: int) -> None:
        rank = self.ranks.read(fd)
        if rank:
            self._handle_report(rank)

    def _handle_report(self, rank: RankProcess) -> None:
        """Handle the rank's report of its exception, if it has sent one. It arrives before its connections break."""
        failure = self.ranks.report_of(rank)
        if failure:
            self._handle_failure(rank, failure)
            rank.kill_at = time.monotonic() + EXIT_TIMEOUT

    def _handle_rank_exit(self, pid: int, status: int) -> None:
        rank = self.ranks.remove(pid)
        if rank is None:
            return
        self._handle_report(rank)
        if rank.progress.step >= 0:
            self.step = max(self.step or 0, rank.progress.step)
        self.saved = bool(self.saved) or rank.progress.saved >= 0 or rank.progress.restored > 0
        code = os.waitstatus_to_exitcode(status)
        if code == 0 and not rank.terminated:
            self.finished.append(self.ranks.failure_of_exit(rank, 0))
        elif code != 0 and rank.failure is None and not self._stopped_as_told(rank, code):
            self._handle_failure(rank, self.ranks.failure_of_exit(rank, code))
        self.report_due = not self.ranks

    def _report_end_of_ranks(self) -> None:
        """Tell the leader that all ranks of this pod have ended well.

        If they have saved to end, the partner must have its copies first: the memory of this pod may be gone soon.
        """
        attempt = self._healthy_attempt()
        if attempt and len(self.finished) == self.settings.processes:
            self.member.report_success(attempt)
        elif attempt and self.preemption:
            if self.memory and self.memory.busy and not self._overdue:
                return
            self.member.report_ranks_ended(attempt, self.preemption.saved)
        self.report_due = False

    def _handle_failure(self, rank: RankProcess, failure: Failure) -> None:
        if self.stop_signal == signal.SIGINT or self.attempt is None or rank.ended_by_launcher(failure):
            return  # the launcher has ended this rank
        if rank.terminated and failure.kind in _ANSWERS and not self._has_failed_alike(failure):
            failure = replace(failure, kind=Kind.STOPPED)
        rank.failure = failure
        if rank.terminated and self.preemption:
            return  # a rank may end in any way after SIGTERM: the attempt ends when all have
        self.failures.append(failure)
        if not self.attempt_over:
            self.member.report_failure(self.attempt, failure)

    def _has_failed_alike(self, failure: Failure) -> bool:
        """Whether another rank has failed in the same way, so that SIGTERM is not why this one failed."""
        known = [*self.failures, self.end] if self.end else self.failures
        return any(failure.signature == each.signature for each in known)

    def _stopped_as_told(self, rank: RankProcess, code: int) -> bool:
        return code == ExitCode.PREEMPTED and self.preemption is not None and self.preemption.stopped(rank.progress)

    # Signals and timeouts ----------------------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> None:
        if number == STACKS_SIGNAL:
            self.control.print_stacks()
            return
        if self.stop_signal is not None:
            if number == signal.SIGINT:  # Ctrl-C again; the kubelet may repeat SIGTERM, while the ranks save
                self.ranks.kill()
            return
        self.stop_signal = number
        if number != signal.SIGINT:
            self.stop_at = time.monotonic() + self.settings.grace + LAST_WAIT
        if self.attempt is None or self.attempt_over or not self.ranks:
            return
        message = f"received {signal.Signals(number).name}"
        if number == signal.SIGINT:
            self.member.report_failure(self.attempt, replace(self.ranks.new_failure(Kind.LOST), message=message))
            self.ranks.terminate(number, min(self.settings.grace, INTERRUPT_GRACE))
        else:
            self.ranks.kill_within(self.settings.grace)
            self.member.request_preemption(
                self.attempt, replace(self.ranks.new_failure(Kind.PREEMPTED), message=message)
            )

    def _must_wait(self) -> bool:
        """Whether this launcher, told to stop, has to wait, though its ranks have ended.

        It waits until the ranks of all pods have ended, because pod 0 leads until then. It also waits until pods that
        stay hold the shards of a checkpoint that would be lost with this pod.
        """
        if self._overdue:
            return False
        if self.preemption is not None and not self.attempt_over:
            return True
        if self.draining is None:
            self.draining = self.stop_signal != signal.SIGINT and self.member.request_drain()
        return self.draining

    @property
    def _overdue(self) -> bool:
        return self.stop_signal is not None and time.monotonic() >= self.stop_at

    def _handle_timeouts(self) -> None:
        self.ranks.kill_overdue()
        self.failures += self.ranks.abandon_unkillable()
        if self.attempt and self.preemption and not self.attempt_over:
            boundaries = self.preemption.boundaries(time.monotonic())
            if boundaries is not None:
                self.member.report_boundaries(self.attempt, boundaries)
        if self.report_due:
            self._report_end_of_ranks()
        if self.attempt and not self.attempt_over and time.monotonic() >= self.watch.due:
            self.watch.update(self.attempt.number, self.ranks)
            self.records.keep_progress(rank.progress for rank in self.ranks)
        if self.attempt and not self.restored:
            self._report_restored(self.attempt)
        attempt, deadline = self._healthy_attempt(), self.settings.deadline
        if attempt and deadline and time.monotonic() - self.started >= deadline:
            message = f"{deadline:g} s since the launcher started"
            failure = replace(self.ranks.new_failure(Kind.DEADLINE), message=message)
            self.failures.append(failure)
            self.member.report_failure(attempt, failure)

    def _report_restored(self, attempt: AttemptStarted) -> None:
        """Tell the leader, once, after which step the ranks of this attempt began, if they say so.

        The step is the same in all pods.
        """
        page = next((rank.progress for rank in self.ranks if rank.progress.restored >= 0), None)
        if page is None:
            return
        self.restored = True
        source = SOURCES[page.restored_from]
        self.member.report_restored(attempt, page.restored, source)
        attempt.history[-1] = replace(attempt.history[-1], restored=page.restored, restored_from=source)
        if self.rendezvous:
            self.records.write_running(attempt.history)

    def _orphans_have_ended(self) -> bool:
        """Kill the processes that ranks have left. Returns whether the launcher may go on: they are gone, or stay."""
        if not (self.attempt_over or self.final_record or self.stop_signal is not None):
            return False
        now = time.monotonic()
        if self.ranks.kill_orphans():
            self.orphans_until = None
        elif self.orphans_until is None:
            self.orphans_until = now + ORPHANS_TIMEOUT
        return self.orphans_until is None or now >= self.orphans_until

    def _select_timeout(self) -> float | None:
        """Seconds until the next timeout; 0 if a rank has ended while others were started, None without timeouts."""
        if self.server.pending:
            return 0.0
        if self.orphans_until is not None:
            return ORPHANS_POLL
        times = [self.ranks.next_kill, self.preemption.settled_at if self.preemption else None]
        if self.stop_signal is not None and not self.ranks:
            times.append(self.stop_at)
        if self.attempt and not self.attempt_over:
            times.append(self.watch.due)
        if self.settings.deadline and self._healthy_attempt():
            times.append(self.started + self.settings.deadline)
        return min((max(0.0, due - time.monotonic()) for due in times if due is not None), default=None)

    def _healthy_attempt(self) -> AttemptStarted | None:
        """The attempt, if it is running and nothing has failed in this pod."""
        return None if self.attempt_over or self.failures else self.attempt

    # The end -----------------------------------------------------------------------------------------------------

    def fail_without_server(self, error: ServerDiedError) -> int:
        """End this launcher after the fork server has died, and the ranks with it. Returns the exit code."""
        failure = self.ranks.failure_of_server(str(error))
        if self.attempt:
            self.member.report_failure(self.attempt, failure)
            self.member.wait_until_sent(LAST_WAIT)  # else the leader takes this launcher for killed
        return self.records.finish_without_ranks(failure, self.attempt.history if self.attempt else [])

    def _finish(self, record: JobRecord) -> int:
        code = self.records.finish(record, leader=self.rendezvous is not None)
        if self.memory:
            self.memory.close(remove=record.outcome not in ("replaced", "preempted"))
        if self.rendezvous and record.outcome != "replaced":
            self.rendezvous.wait_for_members_to_leave()
        if self.hub:
            self.hub.close(code)
        return code
