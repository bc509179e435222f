"""Decisions of the leader: when an attempt starts, when and why it ends, and whether another one follows.

The leader has no sockets, threads or clock of its own. The server (`launcher.transport.server`) tells it what the
members send and what time it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.quantities import format_ranges, numbered, plural
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.contract.telemetry import Telemetry
from flk_runtime.launcher.coordinator.membership import LatestAttempt, Membership, Round
from flk_runtime.launcher.coordinator.policy import Decision, Failures, decide, final_reason
from flk_runtime.launcher.hangs import detector
from flk_runtime.launcher.hangs.detector import HangDetector, Stragglers
from flk_runtime.launcher.preemption import Preemption
from flk_runtime.launcher.records.history import job_record, new_record, progress, quarantine, shorten
from flk_runtime.launcher.replication.plan import MemoryPlans
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.telemetry.keeper import Keeper
from flk_runtime.launcher.transport import messages
from flk_runtime.launcher.transport.messages import Message, Send

_PRIMARY_TIMEOUT = 0.5  # seconds to wait for a primary failure after a secondary one has been reported
# Seconds to wait for the other pods' failures when no attempt follows: longer than the agent's EXIT_TIMEOUT.
_LAST_REPORTS_TIMEOUT = 8.0
_PROGRESS_INTERVAL = 30.0  # seconds between two lines about pods that have not joined

_LEADER = 0  # the pod whose launcher leads
_LEADS = "not retried: pod 0 leads the job, and would start on the same node again"


class Leader:
    """The leader: the state of the job as the launcher of pod 0 knows it, and the decisions about it.

    The job is in one of three states:

    - Joining, while ``_round`` is set: members report that they are ready, or `tick` ends the round. An attempt
      follows, or another round in which pods are replaced, or the end of the job.
    - Running, while neither ``_round`` nor ``_record`` is set: ``_latest`` has what is known of the attempt. It ends by
      a failure, by a preemption when all ranks have saved or ended, or with the job when all ranks have succeeded.
    - Over, once ``_record`` is set.

    Times are in seconds by the clock of the caller, which passes ``now``.
    """

    def __init__(
        self,
        settings: Settings,
        send: Send,
        serve_attempt_store: Callable[[], int],
        log: Callable[[str], None],
        now: float,
        telemetry: Keeper | None = None,
    ) -> None:
        """``serve_attempt_store`` replaces the ranks' store and returns the port of the new store.

        ``telemetry`` keeps the measurements of the job; None: nobody asks.
        """
        self._settings = settings
        self._send, self._serve_attempt_store, self._log = send, serve_attempt_store, log
        self._telemetry = telemetry
        self._connected: dict[int, str] = {}  # incarnation of each pod that is connected
        self._joined: dict[int, messages.Join] = {}  # members that are ready for the next attempt, spares included
        self._membership = Membership(settings)
        self._memory_plans = MemoryPlans(settings.processes, log)
        self._history: list[Attempt] = []
        self._failures = Failures()  # in the latest attempt, of all pods
        self._latest = LatestAttempt()
        self._round: Round | None = None  # None: an attempt runs, or the job has ended
        self._record: JobRecord | None = None  # of a job that has ended
        self._left: set[int] = set()  # pods that know it
        self._hang_detector = HangDetector(
            settings.hang_timeout,
            Stragglers(settings.slow_window),
            detector.Actions(
                request=lambda pod, number: send([pod], messages.StacksRequested(number)),
                answer=lambda asker, report: send([asker[0]], messages.Reply(asker[1], report)),
                show=lambda *waits: send([0], messages.WaitsChanged(*waits)),
                log=log,
                compare=telemetry.compare if telemetry else lambda *_: None,
            ),
        )
        self._start_joining(now)

    # What happens ------------------------------------------------------------------------------------------------

    def connected(self, pod: int, incarnation: str) -> None:
        """Note that a launcher of this pod has connected and authenticated itself. The former one is disconnected."""
        self._connected[pod] = incarnation
        self._left.discard(pod)

    def disconnected(self, pod: int, reason: str, now: float, *, closed: bool = False) -> None:
        """Note that the connection to this pod's launcher broke, or its lease expired, as ``reason`` says.

        ``closed``: the other end has closed the connection, as its host does when the launcher is killed.
        """
        if closed:
            self._failures.add_closed(pod)
        lost = self._lost(pod, f"{messages.DISCONNECTED}: {reason}")
        trains = self._runs and pod in self._latest.training
        if trains and self._latest.preemption:
            if self._latest.preemption.failure.kind.meaning.planned:
                self._failures.add(lost)  # nobody has asked for that
            if self._latest.preemption.lose(pod):
                self._end_attempt(self._latest.preemption.failure, now)
        elif trains:
            self._end_attempt(lost, now)
        elif self._round and pod in self._latest.admitted.keys() - self._joined.keys() - self._membership.leaving:
            self._failures.add(lost)  # its ranks had not ended, so this may be the cause of the others' failures
        self._connected.pop(pod, None)
        self._unjoin(pod)
        self._start_if_ready(now)

    def received(self, pod: int, message: Message, now: float) -> None:
        """Handle a message of a member."""
        match message:
            case messages.Join() if self._record:  # the job has ended
                self._send([pod], messages.JobEnded(self._record))
            case messages.Join():
                self._join(pod, message, now)
            case messages.FailureReport(attempt, failure) if self._is_current(attempt):
                self._handle_failure(failure, now)
            case messages.SuccessReport(attempt, grouped) if self._is_current(attempt):
                self._latest.done.add(pod)
                self._latest.grouped = self._latest.grouped or grouped
                if len(self._latest.done) == len(self._latest.admitted):
                    self._history = self._ended(None)
                    ranks = len(self._latest.admitted) * self._settings.processes
                    record = job_record(None, self._history, self._settings.limits)
                    self._end_job(replace(record, alone=0 if self._latest.grouped or ranks == 1 else ranks))
                else:
                    self._handle_ranks_end(pod, None, now)
            case messages.PreemptionRequest(attempt, failure) if self._is_current(attempt):
                self._membership.leave(pod)
                self._start_preemption(replace(failure, kind=self._stop_kind), urgent=True)
            case messages.BoundaryReport(attempt, boundaries) if self._is_current(attempt) and self._latest.preemption:
                self._send_target(self._latest.preemption.add_boundaries(pod, boundaries))
            case messages.RanksEnded(attempt, saved) if self._is_current(attempt):
                self._handle_ranks_end(pod, saved, now)
            case messages.Restored(attempt, step, source) if self._history and self._history[-1].number == attempt:
                last = self._history[-1]
                reached = step if last.step is None or last.step == last.restored else max(step, last.step)
                self._history[-1] = replace(last, restored=step, restored_from=source, step=reached)
            case messages.Unreadable(attempt, checkpoint) if self._is_current(attempt):  # else its end may be why
                self._memory_plans.exclude(checkpoint)
            case messages.Stopping() if not self._record:
                self._go_on_without(pod, now)
            case messages.Leave():
                self._left.add(pod)
            case messages.Heartbeat(status) if status:
                self._hang_detector.heartbeat(pod, status)
                if self._telemetry:
                    self._telemetry.heartbeat(pod, status)
            case messages.StacksReport(number, snapshots):
                self._hang_detector.received_stacks(pod, number, snapshots)
            case messages.Question(messages.Topic.STACKS, asker):
                self._hang_detector.want_stacks((pod, asker), now)
            case messages.Question(messages.Topic.METRICS, asker):
                found = self._telemetry.read() if self._telemetry else Telemetry(time.time())
                self._send([pod], messages.Reply(asker, asdict(found)))

    def tick(self, now: float) -> None:
        """Do all that is due at the time ``now``."""
        hang = self._hang_detector.tick(now)
        if hang and self._is_current(hang.attempt):
            self._end_attempt(hang, now)
        if self._runs and self._latest.secondary and now >= self._latest.end_at:
            self._end_attempt(self._latest.secondary, now)
        elif self._runs:
            grows_at = self._grows_at()
            if grows_at is not None and now >= grows_at:
                self._admit_waiting()
        elif self._round:
            if now >= self._round.ends_at:
                self._finish_joining(self._round, now)
            elif now >= self._round.progress_at:
                self._round.progress_at = now + _PROGRESS_INTERVAL
                missing = self._membership.missing(self._joined)
                if missing and self._round.start_at is None and decide(self._history, self._settings.limits).restart:
                    self._log(
                        f"{len(self._joined)} of {self._settings.pods} pods have joined; waiting for pod {missing[0]}"
                    )

    def due(self) -> float | None:
        """The time at which `tick` has something to do; None if nothing is planned."""
        times = [self._hang_detector.due()]
        if self._runs:
            times += [self._latest.end_at if self._latest.secondary else None, self._grows_at()]
        elif self._round:
            times += [self._round.ends_at, self._round.progress_at]
        return min((each for each in times if each is not None), default=None)

    @property
    def all_know_the_end(self) -> bool:
        """Whether the job has ended and every member of the latest attempt, or that is connected, knows the record."""
        return self._record is not None and self._left >= {*self._latest.admitted, *self._connected}

    # Rounds ------------------------------------------------------------------------------------------------------

    def _start_joining(self, now: float) -> None:
        restart = decide(self._history, self._settings.limits).restart
        timeout = self._settings.join_timeout if restart else _LAST_REPORTS_TIMEOUT
        self._round = Round(now, now + timeout, now + _PROGRESS_INTERVAL)

    def _join(self, pod: int, join: messages.Join, now: float) -> None:
        self._joined[pod] = replace(join, history=[])  # only `_learn` needs it
        if self._runs:
            # A pod that was admitted had succeeded and lost its connection then: it does not wait to take part.
            if pod not in self._latest.admitted and not join.fault:
                self._latest.waiting[pod] = now
            return
        if not self._latest.admitted and join.history:
            self._learn(pod, join.history, now)
        self._failures.add(*join.failures)
        self._start_if_ready(now)

    def _learn(self, pod: int, history: list[Attempt], now: float) -> None:
        """Adopt a member's history if it is more complete than ours: a new leader starts with none.

        Of two that are as complete, another pod's counts, since its launcher was there. The launcher of pod 0 is as new
        as the leader, and has read its history in the cluster.
        """
        if (progress(history), pod != 0) <= (progress(self._history), False):
            return
        self._history = history
        self._membership.resume(history[-1].pods)
        if self._round and not decide(history, self._settings.limits).restart:
            self._round.deadline = now + _LAST_REPORTS_TIMEOUT

    def _unjoin(self, pod: int) -> None:
        """Note that a member is not ready for the next attempt any more."""
        self._latest.waiting.pop(pod, None)
        if self._joined.pop(pod, None) and self._round:
            self._round.start_at = None

    def _go_on_without(self, pod: int, now: float) -> None:
        """Wait no longer for a pod that has to stop and runs no rank, and end the attempt if it has begun with it."""
        self._membership.leave(pod)
        self._unjoin(pod)
        latest = self._latest
        if self._runs and pod in latest.training and not (latest.preemption or latest.secondary):
            name, node = latest.places[pod]
            stopped = replace(self._lost(pod, "received a signal to stop"), kind=self._stop_kind)
            self._end_attempt(replace(stopped, pod_name=name, node=node), now)
        self._start_if_ready(now)

    def _start_if_ready(self, now: float) -> None:
        """Start the next attempt, or note when it may start, if enough members have joined."""
        joining = self._round
        if joining and joining.start_at is None:
            joining.call_until = self._membership.ready_at(self._joined, self._connected, now)
            if joining.call_until is not None and now >= joining.call_until:
                self._finish_joining(joining, now)

    def _finish_joining(self, joining: Round, now: float) -> None:
        """Start an attempt or end the job, since enough members have joined or the time for it is over."""
        joining.start_at = joining.call_until = None
        if self._history:
            replaced = [pod for pod in self._joined if self._latest.admitted.get(pod) != self._connected.get(pod)]
            self._history[-1] = self._failures.explain(self._history[-1], self._joined, self._latest.places, replaced)
        decision = decide(self._history, self._settings.limits)
        deadline = joining.since + self._settings.join_timeout
        if decision.restart and self._lacks_pods and now < deadline:
            joining.deadline = deadline  # the first failure was final, and the cause is not
            return
        record = self._final_record(decision)
        if record:
            self._end_job(record)
        elif unhealthy := {pod: fault for pod, join in self._joined.items() if (fault := join.fault)}:
            self._refuse(unhealthy, decision, now)
        elif self._replace_unusable_pods():
            joining.deadline = now + self._settings.join_timeout
        elif now < joining.since + decision.delay:
            joining.start_at = joining.since + decision.delay
            self._log(f"the next attempt starts in {joining.start_at - now:.0f} s")
        else:
            self._start_attempt(decision, now)

    def _replace_unusable_pods(self) -> bool:
        """Send away the launchers whose pods cannot run ranks any more, and return whether there are any.

        They end with a code after which the operator starts other pods in their place.
        """
        unusable = {}
        for failure in self._failures:
            pod = failure.pod
            same = self._latest.admitted.get(pod) == self._connected.get(pod)  # else it has been replaced already
            if failure.kind.meaning.needs_new_pod and pod in self._joined and same:
                unusable[pod] = failure
        self._send_away(unusable)
        return bool(unusable)

    def _send_away(self, pods: Mapping[int, Failure]) -> None:
        for pod, failure in pods.items():
            self._joined.pop(pod)
            record = new_record("replaced", ExitCode.UNUSABLE, failure, self._history, self._settings.limits)
            self._send([pod], messages.JobEnded(record))

    def _refuse(self, unhealthy: Mapping[int, Failure], decision: Decision, now: float) -> None:
        """Send away pods on unhealthy nodes. It counts as an attempt, so that the restart policy bounds how often.

        Pod 0 cannot lead the job elsewhere, and a new pod 0 would know nothing of this: the job ends.
        """
        last = self._history[-1] if self._history else None
        number, moment = last.number + 1 if last else 0, time.time()
        cause = replace(unhealthy[min(unhealthy)], attempt=number)
        step = last.step if last else None
        attempt = Attempt(number, moment, moment, cause, decision.restarts, decision.disruptions, step)
        self._history = [*shorten(self._history), attempt]
        self._failures.clear()
        if _LEADER in unhealthy:
            self._end_job(job_record(cause, self._history, self._settings.limits, _LEADS))
            return
        self._log(f"{cause.summary}; another pod has to replace it")
        self._send_away(unhealthy)
        self._start_joining(now)

    def _start_attempt(self, decision: Decision, now: float) -> None:
        settings = self._settings
        last = self._history[-1] if self._history else None
        number = last.number + 1 if last else 0
        avoided = {each.node for each in quarantine(self._history, settings.limits.node_memory)}
        pods = self._membership.choose(self._joined, avoided)
        order = format_ranges(pods)
        attempt = Attempt(
            number,
            time.time(),
            restarts=decision.restarts,
            disruptions=decision.disruptions,
            pods=order,
        )
        self._history = [*shorten(self._history), attempt]
        self._round = None
        self._failures.clear()
        self._latest = LatestAttempt(
            admitted={pod: self._connected[pod] for pod in pods},
            places={pod: (self._joined[pod].pod_name, self._joined[pod].node) for pod in pods},
        )
        self._hang_detector.attempt_started(number, self._latest.places, now)
        if self._telemetry:
            self._telemetry.start_attempt(number, self._latest.places)
        inventories = {pod: join.memory for pod, join in self._joined.items()}
        plan = self._memory_plans.make({pod: self._joined[pod].node for pod in pods}, inventories)
        for pod, memory in plan.slices(pods, settings.processes) if plan else ():
            self._send([pod], memory)
        readers = plan.readers if plan else []
        again = number > 0 or any(join.again for join in self._joined.values())
        for pod in pods:
            del self._joined[pod]
        address = "127.0.0.1" if settings.pods == 1 else settings.pod_ip or settings.rendezvous_host
        port = self._serve_attempt_store()
        self._send(pods, messages.AttemptStarted(number, address, port, self._history, order, readers, None, again))

    def _handle_failure(self, failure: Failure, now: float) -> None:
        if failure.kind.meaning.saves:
            self._start_preemption(failure, urgent=True)
        elif not failure.secondary:
            self._end_attempt(failure, now)
        elif self._latest.secondary is None:
            # The rank that failed first may still be ending. Its launcher must not end it before that is known.
            self._latest.secondary, self._latest.end_at = failure, now + _PRIMARY_TIMEOUT

    def _start_preemption(self, failure: Failure, *, urgent: bool) -> None:
        """Have all ranks save after the same step and end; ``urgent``: within the grace period."""
        first = self._latest.preemption is None
        if first:
            self._latest.preemption = Preemption(self._latest.training, failure)
        if first or (urgent and not self._latest.urgent):
            self._latest.urgent = urgent
            self._send(self._latest.admitted, messages.PreemptionStarted(self._history[-1].number, failure, urgent))

    def _grows_at(self) -> float | None:
        """The time at which pods that wait are admitted to the attempt that runs; None if that is not planned."""
        if self._latest.preemption or self._latest.done or self._latest.secondary:
            return None
        return self._membership.grows_at(self._latest.waiting)

    def _admit_waiting(self) -> None:
        """End the attempt after a step, so that the next one starts with the pods that wait."""
        pod = min(self._latest.waiting)
        join, size = self._joined[pod], len(self._latest.admitted)
        more = min(len(self._latest.waiting), self._settings.most_pods - size)
        message = f"joined: {size} → {plural(size + more, 'pod')}"
        number = self._history[-1].number
        cause = Failure(
            Kind.RESIZED, pod, pod_name=join.pod_name, node=join.node, attempt=number, time=time.time(), message=message
        )
        self._start_preemption(cause, urgent=False)

    def _send_target(self, step: int | None) -> None:
        if step is not None:
            self._send(self._latest.admitted, messages.SaveAt(self._history[-1].number, step))

    def _handle_ranks_end(self, pod: int, saved: int | None, now: float) -> None:
        if self._latest.preemption:
            self._send_target(self._latest.preemption.add_end(pod, saved))
            if self._latest.preemption.over:
                self._end_attempt(self._latest.preemption.failure, now)

    def _end_attempt(self, failure: Failure, now: float) -> None:
        self._failures.add(failure)
        if self._latest.preemption:
            self._failures.add(self._latest.preemption.failure)
        self._history = self._ended(failure)
        self._send(self._latest.admitted, messages.AttemptEnded(failure.attempt, failure))
        self._hang_detector.attempt_ended()
        self._membership.start_round()
        self._start_joining(now)

    def _end_job(self, record: JobRecord) -> None:
        self._round, self._record = None, record
        self._hang_detector.attempt_ended()
        self._send(self._connected, messages.JobEnded(record))

    # Facts -------------------------------------------------------------------------------------------------------

    @property
    def _runs(self) -> bool:
        """Whether an attempt runs."""
        return self._round is None and self._record is None

    def _is_current(self, attempt: int) -> bool:
        return self._runs and self._history[-1].number == attempt

    def _ended(self, failure: Failure | None) -> list[Attempt]:
        """The history with the end of the latest attempt."""
        return [*self._history[:-1], replace(self._history[-1], ended=time.time(), failure=failure)]

    @property
    def _stop_kind(self) -> Kind:
        """The kind of the failure of a pod that had to stop."""
        return Kind.RESIZED if self._settings.elastic else Kind.PREEMPTED

    @property
    def _lacks_pods(self) -> bool:
        """Whether fewer pods have joined than an attempt needs."""
        return len(self._joined) < self._settings.least_pods

    def _lost(self, pod: int, message: str) -> Failure:
        number = self._history[-1].number if self._history else 0
        return Failure(Kind.LOST, pod, attempt=number, time=time.time(), message=message)

    def _final_record(self, decision: Decision) -> JobRecord | None:
        """The record of the job if no further attempt follows."""
        settings, history = self._settings, self._history
        if not decision.restart:
            return job_record(history[-1].failure, history, settings.limits, decision.no_retry_reason)
        if not self._lacks_pods:
            return None
        missing = self._membership.missing(self._joined)
        needed = f" ({settings.least_pods} are needed)" if settings.least_pods < settings.pods else ""
        who = f"{numbered('pod', missing)} of {settings.pods}{needed}"
        message = f"never joined: waited {settings.join_timeout:.0f} s for {who}"
        attempt = history[-1].number if history else 0
        cause = Failure(Kind.ABSENT, missing[0], attempt=attempt, time=time.time(), message=message)
        return job_record(cause, history, settings.limits, final_reason(cause))
