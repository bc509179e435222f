"""Decisions of the leader: when an attempt starts, when and why it ends, and whether another one follows.

The leader has no sockets, threads or clock of its own. `server` tells it what the members send and what time it is.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import replace

from flk_runtime.contract import Attempt, ExitCode, Failure, JobRecord
from flk_runtime.launcher.failures import job_record, new_record, progress, root_cause, shorten
from flk_runtime.launcher.hangs.overseer import Overseer
from flk_runtime.launcher.hangs.stragglers import Stragglers
from flk_runtime.launcher.policy import Decision, decide, needs_new_pod
from flk_runtime.launcher.preemption import Preemption
from flk_runtime.launcher.rendezvous.messages import (
    AttemptEnded,
    AttemptStarted,
    BoundaryReport,
    FailureReport,
    Heartbeat,
    JobEnded,
    Join,
    Leave,
    Message,
    PreemptionRequest,
    PreemptionStarted,
    RanksEnded,
    SaveAt,
    SlowRanksChanged,
    StacksGathered,
    StacksReport,
    StacksRequested,
    StacksWanted,
    SuccessReport,
)
from flk_runtime.launcher.settings import Settings

_PRIMARY_TIMEOUT = 0.5  # seconds to wait for a primary failure after a secondary one has been reported
_LAST_REPORTS_TIMEOUT = 5.0  # seconds to wait for the other pods' failures when no attempt follows
_PROGRESS_INTERVAL = 30.0  # seconds between two lines about pods that have not joined
_SHOWN_PODS = 10  # missing pods that a message names

_DISCONNECTED = "lost the connection to pod 0"
_RESTARTED = "was restarted"


class _Phase(enum.Enum):
    JOINING = enum.auto()  # waits for all members to be ready for the next attempt
    RUNNING = enum.auto()  # an attempt runs
    DONE = enum.auto()  # the job has ended


class Leader:
    """State of the job as the launcher of pod 0 knows it.

    Times are in seconds by the clock of the caller, which passes ``now``.
    """

    def __init__(
        self,
        settings: Settings,
        send: Callable[[int, Message], None],
        serve_ranks_store: Callable[[], int],
        log: Callable[[str], None],
        now: float,
    ) -> None:
        """``send`` sends a message to a pod, if that is connected. ``serve_ranks_store`` replaces the ranks' store.

        It returns the port of the new one.
        """
        self._settings = settings
        self._send = send
        self._serve_ranks_store = serve_ranks_store
        self._log = log
        self._phase = _Phase.JOINING
        self._connected: dict[int, str] = {}  # incarnation of each pod that is connected
        self._joined: dict[int, Join] = {}  # members that are ready for the next attempt
        self._admitted: dict[int, str] = {}  # incarnations that take part in the latest attempt
        self._done: set[int] = set()  # pods whose ranks have all ended with success
        self._left: set[int] = set()  # pods that know how the job ended
        self._history: list[Attempt] = []
        self._failures: list[Failure] = []  # in the latest attempt, of all pods
        self._secondary: Failure | None = None  # has been reported and will end the attempt
        self._preemption: Preemption | None = None  # of the running attempt
        self._end_at = 0.0  # time at which it does
        self._record: JobRecord | None = None
        self._join_deadline = self._progress_at = self._joining_since = now
        self._start_at: float | None = None  # when the next attempt starts, if all members have joined until then
        self._overseer = Overseer(
            settings.hang_timeout,
            Stragglers(settings.slow_factor, settings.slow_window),
            request=lambda pod, number: send(pod, StacksRequested(number)),
            answer=lambda asker, report: send(asker[0], StacksGathered(asker[1], report)),
            show_slow=lambda slow: send(0, SlowRanksChanged(slow)),
            log=log,
        )
        self._start_joining(now)

    # What happens ------------------------------------------------------------------------------------------------

    def connected(self, pod: int, incarnation: str) -> None:
        """A launcher of this pod has connected and authenticated itself. The former one has been disconnected."""
        self._connected[pod] = incarnation
        self._left.discard(pod)

    def disconnected(self, pod: int, reason: str, now: float) -> None:
        """The connection to this pod's launcher broke, or its lease expired, as ``reason`` says."""
        lost = self._lost(pod, f"{_DISCONNECTED}: {reason}")
        if self._phase is _Phase.RUNNING and self._preemption:
            if self._preemption.lose(pod):
                self._end_attempt(self._preemption.failure, now)
        elif self._phase is _Phase.RUNNING and pod not in self._done:
            self._end_attempt(lost, now)
        elif self._phase is _Phase.JOINING and pod not in self._joined:
            self._failures.append(lost)  # its ranks had not ended, so this may be the cause of the others' failures
        self._connected.pop(pod, None)
        if self._joined.pop(pod, None):
            self._start_at = None

    def received(self, pod: int, message: Message, now: float) -> None:
        """Handle a message of a member."""
        match message:
            case Join():
                self._join(pod, message, now)
            case FailureReport(attempt, failure) if self._is_current(attempt):
                self._handle_failure(failure, now)
            case SuccessReport(attempt) if self._is_current(attempt):
                self._done.add(pod)
                if len(self._done) == self._settings.pods:
                    self._history = self._ended(None)
                    self._end_job(job_record(None, self._history, self._settings.limits))
                else:
                    self._handle_ranks_end(pod, None, now)
            case PreemptionRequest(attempt, failure) if self._is_current(attempt):
                self._start_preemption(failure)
            case BoundaryReport(attempt, boundaries) if self._is_current(attempt) and self._preemption:
                self._send_target(self._preemption.add_boundaries(pod, boundaries))
            case RanksEnded(attempt, saved) if self._is_current(attempt):
                self._handle_ranks_end(pod, saved, now)
            case Leave():
                self._left.add(pod)
            case Heartbeat(status) if status:
                self._overseer.heartbeat(pod, status)
            case StacksReport(number, snapshots):
                self._overseer.received_stacks(pod, number, snapshots)
            case StacksWanted(asker):
                self._overseer.want_stacks((pod, asker), now)

    def tick(self, now: float) -> None:
        """Do what is due at this time."""
        hang = self._overseer.tick(now)
        if hang and self._is_current(hang.attempt):
            self._end_attempt(hang, now)
        if self._phase is _Phase.RUNNING and self._secondary and now >= self._end_at:
            self._end_attempt(self._secondary, now)
        elif self._phase is _Phase.JOINING and self._start_at is not None:
            if now >= self._start_at:
                self._finish_joining(now)
        elif self._phase is _Phase.JOINING:
            if now >= self._join_deadline:
                self._finish_joining(now)
            elif now >= self._progress_at:
                self._progress_at = now + _PROGRESS_INTERVAL
                if decide(self._history, self._settings.limits).restart:
                    missing = self._missing()
                    count = f"{len(self._joined)} of {self._settings.pods}"
                    self._log(f"{count} pods have joined; waiting for pod {missing[0]}")

    def due(self) -> float | None:
        """The time at which `tick` has something to do; None if nothing is planned."""
        times = [self._overseer.due()]
        if self._phase is _Phase.RUNNING and self._secondary:
            times.append(self._end_at)
        elif self._phase is _Phase.JOINING and self._start_at is not None:
            times.append(self._start_at)
        elif self._phase is _Phase.JOINING:
            times += [self._join_deadline, self._progress_at]
        return min((each for each in times if each is not None), default=None)

    @property
    def all_know_the_end(self) -> bool:
        """Whether the job has ended and every member of the latest attempt, or that is connected, knows the record."""
        return self._phase is _Phase.DONE and self._left >= {*self._admitted, *self._connected}

    # Rounds ------------------------------------------------------------------------------------------------------

    def _start_joining(self, now: float) -> None:
        restart = decide(self._history, self._settings.limits).restart
        self._phase = _Phase.JOINING
        self._joining_since, self._start_at = now, None
        self._join_deadline = now + (self._settings.join_timeout if restart else _LAST_REPORTS_TIMEOUT)
        self._progress_at = now + _PROGRESS_INTERVAL

    def _join(self, pod: int, join: Join, now: float) -> None:
        if self._phase is _Phase.DONE:
            if self._record:
                self._send(pod, JobEnded(self._record))
            return
        self._joined[pod] = join
        if self._phase is _Phase.RUNNING:
            return  # the pod had succeeded, and lost its connection afterwards
        if not self._admitted:  # a leader that was restarted has no history; members that were there before send theirs
            self._history = max(self._history, join.history, key=progress)
        self._failures += join.failures
        if len(self._joined) == self._settings.pods:
            self._finish_joining(now)

    def _finish_joining(self, now: float) -> None:
        """All members have joined, or the time for it is over: start an attempt, or end the job."""
        if self._history:
            self._history[-1] = self._with_root_cause(self._history[-1])
        decision = decide(self._history, self._settings.limits)
        deadline = self._joining_since + self._settings.join_timeout
        if decision.restart and self._missing() and now < deadline:
            self._join_deadline = deadline  # the first failure was final, and the cause is not
            return
        record = self._final_record(decision)
        if record:
            self._end_job(record)
        elif self._replace_unusable_pods():
            self._join_deadline = now + self._settings.join_timeout
        elif now < self._joining_since + decision.delay:
            self._start_at = self._joining_since + decision.delay
            self._log(f"the next attempt starts in {self._start_at - now:.0f} s")
        else:
            self._start_attempt(decision, now)

    def _replace_unusable_pods(self) -> bool:
        """Send away the launchers whose pods cannot run ranks any more, and return whether there are any.

        They end with a code after which the operator starts other pods in their place.
        """
        unusable = {}
        for failure in self._failures:
            pod = failure.pod
            same = self._admitted.get(pod) == self._connected.get(pod)  # else it has been replaced already
            if needs_new_pod(failure) and pod in self._joined and same:
                unusable[pod] = failure
        for pod, failure in unusable.items():
            self._joined.pop(pod)
            record = new_record("replaced", ExitCode.UNUSABLE, failure, self._history, self._settings.limits)
            self._send(pod, JobEnded(record))
        return bool(unusable)

    def _start_attempt(self, decision: Decision, now: float) -> None:
        settings = self._settings
        number = self._history[-1].number + 1 if self._history else 0
        attempt = Attempt(number, time.time(), restarts=decision.restarts, disruptions=decision.disruptions)
        self._history = [*shorten(self._history), attempt]
        self._start_at = None
        self._phase = _Phase.RUNNING
        self._admitted = dict(self._connected)
        self._failures, self._secondary = [], None
        self._done.clear()
        places = {pod: (self._joined[pod].pod_name, self._joined[pod].node) for pod in self._admitted}
        self._overseer.attempt_started(number, places, now)
        self._joined.clear()
        address = "127.0.0.1" if settings.pods == 1 else settings.pod_ip or settings.rendezvous_host
        start = AttemptStarted(number, address, self._serve_ranks_store(), self._history)
        self._send_to_all(start)

    def _handle_failure(self, failure: Failure, now: float) -> None:
        if not failure.secondary:
            self._end_attempt(failure, now)
        elif self._secondary is None:
            # The rank that failed first may still be ending. Its launcher must not end it before that is known.
            self._secondary, self._end_at = failure, now + _PRIMARY_TIMEOUT

    def _start_preemption(self, failure: Failure) -> None:
        if self._preemption is None:
            self._preemption = Preemption(self._admitted, failure)
            self._send_to_all(PreemptionStarted(self._history[-1].number, failure))

    def _send_target(self, step: int | None) -> None:
        if step is not None:
            self._send_to_all(SaveAt(self._history[-1].number, step))

    def _handle_ranks_end(self, pod: int, saved: int | None, now: float) -> None:
        if self._preemption:
            self._send_target(self._preemption.add_end(pod, saved))
            if self._preemption.over:
                self._end_attempt(self._preemption.failure, now)

    def _send_to_all(self, message: Message) -> None:
        for pod in self._admitted:
            self._send(pod, message)

    def _end_attempt(self, failure: Failure, now: float) -> None:
        self._failures.append(failure)
        if self._preemption:
            self._failures.append(self._preemption.failure)
            self._preemption = None
        self._history = self._ended(failure)
        self._send_to_all(AttemptEnded(failure.attempt, failure))
        self._overseer.attempt_ended()
        self._start_joining(now)

    def _end_job(self, record: JobRecord) -> None:
        self._phase = _Phase.DONE
        self._record = record
        self._overseer.attempt_ended()
        for pod in list(self._connected):
            self._send(pod, JobEnded(record))

    # Facts -------------------------------------------------------------------------------------------------------

    def _is_current(self, attempt: int) -> bool:
        return self._phase is _Phase.RUNNING and self._history[-1].number == attempt

    def _ended(self, failure: Failure | None) -> list[Attempt]:
        """The history with the end of the latest attempt."""
        return [*self._history[:-1], replace(self._history[-1], ended=time.time(), failure=failure)]

    def _missing(self) -> list[int]:
        return [pod for pod in range(self._settings.pods) if pod not in self._joined]

    def _lost(self, pod: int, message: str) -> Failure:
        number = self._history[-1].number if self._history else 0
        return Failure("lost", pod, attempt=number, time=time.time(), message=message)

    def _with_root_cause(self, attempt: Attempt) -> Attempt:
        """The attempt with its root cause among the failures that all pods saw."""
        seen = [self._described(failure) for failure in self._failures if failure.attempt == attempt.number]
        if attempt.failure:
            seen.append(self._described(attempt.failure))
        if not seen:
            return attempt
        steps = [failure.step for failure in seen if failure.step is not None]
        return replace(attempt, failure=root_cause(seen), step=max(steps, default=None))

    def _described(self, failure: Failure) -> Failure:
        """The failure, with the names of a pod that the leader lost, and what is known of it by now."""
        join = self._joined.get(failure.pod)
        if failure.kind != "lost" or failure.pod_name or join is None:
            return failure
        restarted = self._admitted.get(failure.pod) != self._connected.get(failure.pod)
        message = _RESTARTED if restarted else failure.message
        return replace(failure, pod_name=join.pod_name, node=join.node, message=message)

    def _final_record(self, decision: Decision) -> JobRecord | None:
        """The record of the job if no further attempt follows."""
        settings, history = self._settings, self._history
        if not decision.restart:
            return job_record(history[-1].failure, history, settings.limits, decision.verdict)
        missing = self._missing()
        if not missing:
            return None
        pods = ", ".join(map(str, missing[:_SHOWN_PODS])) + (", …" if len(missing) > _SHOWN_PODS else "")
        message = f"never joined: waited {settings.join_timeout:.0f} s, missing of {settings.pods} pods: {pods}"
        attempt = history[-1].number if history else 0
        cause = Failure("lost", missing[0], attempt=attempt, time=time.time(), message=message)
        return job_record(cause, history, settings.limits)
