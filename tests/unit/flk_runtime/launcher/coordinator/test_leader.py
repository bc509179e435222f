"""Decisions of the leader of the rendezvous, on a clock of the test's own."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import replace

import pytest

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import BEFORE_FIRST, Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.launcher.agent import EXIT_TIMEOUT
from flk_runtime.launcher.coordinator.leader import Leader
from flk_runtime.launcher.preemption import NO_STEP, Boundary
from flk_runtime.launcher.replication import Inventory, MemoryPlan
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.settings import Limits, Settings
from flk_runtime.launcher.transport.messages import (
    MESSAGES,
    AttemptEnded,
    AttemptStarted,
    BoundaryReport,
    FailureReport,
    FromMember,
    JobEnded,
    Join,
    Leave,
    Message,
    PreemptionRequest,
    PreemptionStarted,
    RanksEnded,
    Restored,
    SaveAt,
    SuccessReport,
    Unreadable,
)
from flk_runtime.wire import MessageError
from tests.unit.flk_runtime.launcher.transport.test_messages import EXAMPLES, mutants

RAISED = Failure(Kind.EXCEPTION, 1, 1, type="ValueError")


class Job:
    """A leader, and what it has sent to each pod."""

    def __init__(
        self,
        pods: int = 3,
        restarts: int = 3,
        join_timeout: float = 60.0,
        disruptions: int = 100,
        least: int = 0,
        spares: int = 0,
    ) -> None:
        self.now = 1000.0
        self.sent: dict[int, list[Message]] = {pod: [] for pod in range(pods)}
        self.calls: list[Message] = []
        self.log: list[str] = []
        self.ports: Iterator[int] = iter(range(5000, 6000))
        settings = Settings(
            ("train.py",),
            pods=pods,
            min_pods=least,
            spares=spares,
            last_call=5.0,
            pod_ip="10.0.0.1",
            limits=Limits(restarts, disruptions),
            join_timeout=join_timeout,
            lease=15.0,
        )
        self.leader = Leader(settings, self.send, lambda: next(self.ports), self.log.append, self.now)

    def send(self, pods: Collection[int], message: Message) -> None:
        self.calls.append(message)
        for pod in pods:
            self.sent[pod].append(message)

    def connect(self, *pods: int, incarnation: str = "first") -> None:
        for pod in pods:
            self.leader.connected(pod, f"{incarnation} of {pod}")

    def join(
        self,
        *pods: int,
        failures: list[Failure] | None = None,
        history: list[Attempt] | None = None,
        node: str = "node",
        step: int | None = None,
    ) -> None:
        for pod in pods:
            join = Join(f"worker-{pod}", node, history or [], failures or [], step=step)
            self.leader.received(pod, join, self.now)

    def arrive(self, *pods: int, incarnation: str = "first") -> None:
        """The pods connect and join."""
        self.connect(*pods, incarnation=incarnation)
        self.join(*pods)

    def start(self) -> AttemptStarted:
        self.arrive(*self.sent)
        return self.latest(0)

    def latest(self, pod: int) -> AttemptStarted:
        message = self.sent[pod][-1]
        assert isinstance(message, AttemptStarted)
        return message

    def latest_or_none(self, pod: int) -> AttemptStarted | None:
        """The message of an attempt that runs."""
        message = self.sent[pod][-1] if self.sent[pod] else None
        return message if isinstance(message, AttemptStarted) else None

    def ended(self, pod: int = 0) -> JobRecord:
        message = self.sent[pod][-1]
        assert isinstance(message, JobEnded)
        return message.record

    def fail(self, pod: int, *, secondary: bool = False, attempt: int = 0) -> Failure:
        kind = Kind.CONNECTION if secondary else Kind.EXCEPTION
        failure = Failure(kind, pod, pod, attempt=attempt, time=self.now, type="ValueError")
        self.leader.received(pod, FailureReport(attempt, failure), self.now)
        return failure

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.leader.tick(self.now)
        self.leader.due()


@pytest.fixture
def job() -> Job:
    return Job()


def test_an_attempt_starts_when_all_members_have_joined(job: Job) -> None:
    job.connect(0, 1, 2)
    job.join(0, 2)
    assert job.sent == {0: [], 1: [], 2: []}
    job.join(1)
    start = job.latest(1)
    assert (start.number, start.master_address, start.master_port) == (0, "10.0.0.1", 5000)
    assert [list(start.ranks(pod, 2)) for pod in start.pods] == [[0, 1], [2, 3], [4, 5]]
    assert job.calls == [start], "one message for all pods, which is encoded once"
    assert start.history[0].pods == "0-2"


def test_a_failure_ends_the_attempt_in_all_pods_at_once(job: Job) -> None:
    job.start()
    failure = job.fail(1)
    assert all(messages[-1] == AttemptEnded(0, failure) for messages in job.sent.values())
    job.join(0, 1, 2)
    assert (job.latest(0).number, job.latest(0).master_port) == (1, 5001)
    assert job.latest(0).history[0].failure == failure


def test_a_secondary_failure_ends_the_attempt_after_half_a_second(job: Job) -> None:
    job.start()
    secondary = job.fail(0, secondary=True)
    job.wait(0.4)
    job.latest(2)
    job.wait(0.2)
    assert job.sent[2][-1] == AttemptEnded(0, secondary)


def test_a_primary_failure_after_a_secondary_one_ends_the_attempt_at_once(job: Job) -> None:
    job.start()
    job.fail(0, secondary=True)
    primary = job.fail(1)
    assert job.sent[2][-1] == AttemptEnded(0, primary)


@pytest.mark.parametrize("grouped", [(), (1,), (0, 1, 2)])
def test_ranks_that_all_ended_without_a_process_group_are_told(job: Job, grouped: tuple[int, ...]) -> None:
    """N ranks that train N times by themselves succeed, as under torchrun, but not without a word."""
    job.start()
    for pod in range(3):
        job.leader.received(pod, SuccessReport(0, pod in grouped), job.now)
    ended = job.ended()
    ranks = 3 * job.leader._settings.processes
    assert ended.alone == (0 if grouped else ranks)
    assert ended.warning.startswith(f"{ranks} ranks ended and none opened a process group") is not bool(grouped)
    assert JobRecord.from_json(ended.to_json()) == ended


def test_a_pod_that_is_disconnected_after_its_success_does_not_end_the_attempt(job: Job) -> None:
    job.start()
    job.leader.received(2, SuccessReport(0), job.now)
    job.leader.disconnected(2, "it closed the connection", job.now)
    job.latest(0)
    job.connect(2)
    job.join(2, failures=[Failure(Kind.LOST, 2)], history=[Attempt(0, 1.0, 2.0, Failure(Kind.LOST, 2))])
    for pod in (0, 1):
        job.leader.received(pod, SuccessReport(0), job.now)
    ended = job.ended(2)
    assert ended.outcome == "succeeded"
    assert [attempt.failure for attempt in ended.attempts] == [None]


def test_a_container_that_is_killed_twice_at_one_step_ends_the_job(job: Job) -> None:
    """Its launcher is killed with its ranks, so the connection closes at once, and another launcher comes."""
    job.start()
    for attempt in range(2):
        job.leader.disconnected(1, "it closed the connection", job.now, closed=True)
        job.connect(1, incarnation=f"after {attempt}")
        job.join(0, 2, step=7)
        job.join(1)
    ended = job.ended()
    assert ended.code == ExitCode.INFRASTRUCTURE
    assert ended.no_retry_reason == "not retried: failed twice at step 7 with the same error"
    assert ended.failure is not None
    assert ended.failure.summary == "worker-1 was killed, at the memory limit of its container or from outside"


def test_a_launcher_that_connects_again_was_not_killed(job: Job) -> None:
    job.start()
    job.leader.disconnected(1, "Connection reset by peer", job.now, closed=True)
    job.arrive(1)
    job.join(0, 2)
    cause = job.latest(0).history[0].failure
    assert cause is not None
    assert (cause.kind, cause.message) == (
        Kind.LOST,
        "lost the connection to pod 0: Connection reset by peer",
    )


@pytest.mark.promise("Recovery: A container that exceeds its memory limit says so")
def test_a_job_whose_only_container_was_killed_goes_on_with_its_record() -> None:
    """No launcher is left that knows the history. The new one has read it in the cluster."""
    killed = Failure(Kind.CONTAINER_KILLED, 0, attempt=4)
    job = Job(1)
    job.connect(0)
    job.join(0, history=[Attempt(3, 1.0, 2.0, RAISED, 1, step=3), Attempt(4, 3.0, 4.0, killed, 2, 5, 7)])
    started = job.latest(0)
    assert (started.number, started.history[-1].restarts, started.history[-1].disruptions) == (5, 2, 6)
    again = Job(1)
    again.connect(0)
    again.join(0, history=[*started.history[:-1], replace(started.history[-1], failure=killed, ended=5.0, step=7)])
    assert again.ended().no_retry_reason == "not retried: failed twice at step 7 with the same error"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_members_know_more_than_the_record_in_the_cluster(order: tuple[int, int]) -> None:
    job = Job(2)
    job.connect(0, 1)
    killed = Failure(Kind.CONTAINER_KILLED, 0, attempt=4)
    for pod in order:
        job.join(pod, history=[Attempt(4, 3.0, 4.0, RAISED if pod else killed)])
    assert job.latest(0).history[0].failure == RAISED


def test_a_leader_that_learns_of_a_final_failure_waits_for_no_pod_that_is_gone() -> None:
    job = Job(2, restarts=0)
    job.connect(0)
    job.join(0, history=[Attempt(4, 3.0, 4.0, RAISED)])
    job.wait(7.9)
    assert job.sent[0] == []
    job.wait(0.2)
    assert job.ended().failure == RAISED


def test_a_node_that_is_lost_is_the_cause_though_its_peers_are_heard_first(job: Job) -> None:
    job.start()
    job.fail(0, secondary=True)
    job.wait(1.0)
    job.wait(14.0)
    job.leader.disconnected(2, "it was silent for 15 s", job.now)
    job.connect(2, incarnation="second")
    job.join(0, 1, 2)
    cause = job.latest(0).history[0].failure
    assert cause is not None
    assert (cause.kind, cause.pod) == ("lost", 2)


def test_a_leader_that_was_restarted_learns_the_history_from_the_members(job: Job) -> None:
    job.connect(0, 1, 2)
    known = [
        Attempt(30, 1.0, 99.0, Failure(Kind.EXIT, 1, exit_code=1), 2, 28),
        Attempt(31, 99.0, 199.0, Failure(Kind.LOST, 0, attempt=31, message="closed the connection"), 3, 28),
    ]
    job.join(0)
    job.join(1, history=known[:1])
    job.join(2, history=known)
    started = job.latest(0).history
    assert [(attempt.number, attempt.restarts, attempt.disruptions) for attempt in started] == [
        (30, 2, 28),
        (31, 3, 28),
        (32, 3, 29),
    ]
    job.fail(1, attempt=32)
    job.join(0, 1, 2)
    assert job.ended().no_retry_reason == "not retried: all 3 restarts are used"
    assert (job.ended().restarts, job.ended().disruptions) == (3, 29)


def test_the_same_failure_twice_at_one_step_ends_the_job_though_a_peer_had_come_further(job: Job) -> None:
    job.start()
    for attempt, step in enumerate((7, 5)):
        failure = job.fail(1, attempt=attempt)
        job.join(0, 1, failures=[replace(failure, step=step)])
        job.join(2)
    ended = job.ended()
    assert ended.no_retry_reason == "not retried: failed twice at step 5 with the same error"
    assert [attempt.step for attempt in ended.attempts] == [7, 5]


def test_the_second_quick_failure_in_a_row_delays_the_next_attempt(job: Job) -> None:
    job.start()
    for attempt, kind in enumerate((Kind.KILLED, Kind.LOST)):
        failure = Failure(kind, 1, attempt=attempt, signal=9 if kind is Kind.KILLED else None)
        job.leader.received(1, FailureReport(attempt, failure), job.now)
        job.join(0, 1, 2)
        assert (job.latest_or_none(0) is None) == (attempt == 1)
    assert job.leader.due() == job.now + 1
    job.wait(0.5)
    assert job.latest_or_none(0) is None
    job.leader.disconnected(2, "it was killed", job.now)  # while the others wait
    job.wait(1.0)
    assert job.latest_or_none(0) is None
    job.arrive(2, incarnation="second")
    assert job.latest(0).number == 2


def test_a_pod_is_waited_for_if_the_cause_turns_out_to_be_one_that_is_retried() -> None:
    job = Job(restarts=0)
    job.start()
    failure = job.fail(1)  # no restart is left for this one
    job.connect(2, incarnation="second")
    job.join(0, 1, failures=[Failure(Kind.IO, 1, 1, attempt=0, time=failure.time - 1, type="OSError")])
    job.wait(9.0)
    job.join(2)
    assert job.latest(2).number == 1


def test_a_pod_that_never_joins_ends_the_job(job: Job) -> None:
    job.arrive(0, 1)
    job.wait(30.0)
    assert job.log == ["2 of 3 pods have joined; waiting for pod 2"]
    job.wait(30.0)
    ended = job.ended(1)
    assert ended.failure is not None
    assert (ended.failure.pod, ended.code) == (2, 104)


def test_after_the_last_attempt_the_other_pods_have_time_to_end_their_ranks_and_tell_of_failures() -> None:
    job = Job(restarts=0)
    job.start()
    failure = job.fail(1)
    job.join(0, 1)
    job.wait(EXIT_TIMEOUT + 2)
    assert job.sent[0][-1] == AttemptEnded(0, failure)
    job.wait(1.0)
    assert isinstance(job.sent[0][-1], JobEnded)


def test_members_of_the_last_attempt_are_waited_for_until_they_know_the_end(job: Job) -> None:
    job.start()
    for pod in range(3):
        job.leader.received(pod, SuccessReport(0), job.now)
    for pod in range(2):
        job.leader.received(pod, Leave(), job.now)
    job.leader.disconnected(2, "it closed the connection", job.now)
    assert not job.leader.all_know_the_end
    job.sent[2].clear()
    job.arrive(2)
    assert isinstance(job.sent[2][-1], JobEnded)
    job.leader.received(2, Leave(), job.now)
    assert job.leader.all_know_the_end


def preempt(job: Job, pod: int) -> Failure:
    failure = Failure(Kind.PREEMPTED, pod, pod_name=f"worker-{pod}", time=job.now, message="received SIGTERM")
    job.leader.received(pod, PreemptionRequest(0, failure), job.now)
    return failure


@pytest.mark.parametrize(("told", "recorded"), [(None, 40), (12, 40), (43, 43)])
def test_the_step_of_an_attempt_is_at_least_the_one_that_it_restored(job: Job, told: int | None, recorded: int) -> None:
    """A rank that was killed before its first step has told none, or one of the attempt before."""
    job.start()
    job.leader.received(0, Restored(0, 40, "storage"), job.now)
    job.fail(1)
    job.join(0, 1, 2, step=told)
    job.wait(60.0)
    assert job.latest(0).history[0].step == recorded


def test_a_beginning_that_is_corrected_takes_its_step_with_it(job: Job) -> None:
    """A script has restored another checkpoint of its own than flk, of an earlier step."""
    job.start()
    for attempt, step, source in ((0, 40, "storage"), (0, 3, ""), (0, 3, ""), (1, 50, "")):
        job.leader.received(0, Restored(attempt, step, source), job.now)
    job.fail(1)
    job.join(0, 1, 2)
    job.wait(60.0)
    assert (job.latest(0).history[0].restored, job.latest(0).history[0].step) == (3, 3)


def test_a_preemption_ends_when_the_ranks_of_all_pods_have_saved_and_ended(job: Job) -> None:
    job.start()
    failure = preempt(job, 1)
    assert all(messages[-1] == PreemptionStarted(0, failure) for messages in job.sent.values())
    preempt(job, 2)
    for pod in range(3):
        job.leader.received(pod, BoundaryReport(0, [Boundary(7, pod != 2)]), job.now)
    assert all(messages[-1] == SaveAt(0, 8) for messages in job.sent.values())
    for pod in (0, 1):
        job.leader.received(pod, RanksEnded(0, 8), job.now)
    job.leader.disconnected(1, "it closed the connection", job.now)  # its ranks have ended
    assert job.sent[0][-1] == SaveAt(0, 8)
    job.leader.received(2, RanksEnded(0, 8), job.now)
    ended = job.sent[0][-1]
    assert isinstance(ended, AttemptEnded)
    assert (ended.failure.kind, ended.failure.message) == ("preempted", "received SIGTERM; saved after step 8")
    job.connect(1, incarnation="second")
    job.join(0, 1, 2)
    assert job.latest(1).history[0].failure == ended.failure


def test_ranks_that_got_sigterm_are_waited_for_also_when_a_pod_is_gone(job: Job) -> None:
    job.start()
    failure = preempt(job, 1)
    job.leader.received(0, BoundaryReport(0, [Boundary(-1, False)]), job.now)
    assert job.sent[2][-1] == SaveAt(0, NO_STEP)
    job.leader.disconnected(1, "it closed the connection", job.now)
    job.leader.received(0, RanksEnded(0, None), job.now)
    assert job.sent[2][-1] == SaveAt(0, NO_STEP)
    job.leader.received(2, RanksEnded(0, None), job.now)
    assert job.sent[2][-1] == AttemptEnded(0, failure)


def test_a_pod_that_is_gone_before_all_have_saved_ends_the_attempt_for_the_same_cause(job: Job) -> None:
    job.start()
    failure = preempt(job, 1)
    for pod in range(3):
        job.leader.received(pod, BoundaryReport(0, [Boundary(7, True)]), job.now)
    job.leader.received(0, RanksEnded(0, 7), job.now)
    job.leader.disconnected(1, "it closed the connection", job.now)
    said = "received SIGTERM; not all ranks saved after step 7 within the grace period"
    assert job.sent[0][-1] == AttemptEnded(0, replace(failure, message=said))


def test_a_failure_while_the_ranks_save_is_the_cause(job: Job) -> None:
    job.start()
    preempt(job, 1)
    failure = job.fail(2)
    assert job.sent[0][-1] == AttemptEnded(0, failure)
    job.join(0, 1, 2)
    assert job.latest(0).history[0].failure == failure


def test_a_job_whose_ranks_all_succeed_after_all_has_succeeded(job: Job) -> None:
    job.start()
    preempt(job, 1)
    for pod in range(3):
        job.leader.received(pod, SuccessReport(0), job.now)
    assert job.ended(1).outcome == "succeeded"


@pytest.mark.parametrize("kind", [Kind.GPU, Kind.UNKILLABLE])
def test_a_pod_that_cannot_run_ranks_any_more_is_replaced_before_the_next_attempt(job: Job, kind: Kind) -> None:
    job.start()
    job.fail(0, secondary=True)
    unusable = Failure(kind, 1, attempt=0, time=job.now)
    job.leader.received(1, FailureReport(0, unusable), job.now)
    job.join(1, failures=[unusable])
    job.join(0, 2)
    sent_away = job.ended(1)
    assert (sent_away.outcome, sent_away.code) == ("replaced", ExitCode.UNUSABLE)
    assert job.latest_or_none(0) is None
    job.leader.received(1, Leave(), job.now)
    job.leader.disconnected(1, "it closed the connection", job.now)
    job.arrive(1, incarnation="second")
    attempt = job.latest(1).history[-1]
    assert (attempt.number, attempt.restarts, attempt.disruptions) == (1, 0, 1)


def unhealthy(pod: int, attempt: int = BEFORE_FIRST) -> Failure:
    return Failure(Kind.UNHEALTHY, pod, None, f"worker-{pod}", "node-b", attempt, 1.0, message="GPU 3 is lost")


def test_a_pod_on_an_unhealthy_node_is_replaced_before_the_first_attempt() -> None:
    """It counts as an attempt, whose delay grows, and which ends the job when no disruption is left."""
    job = Job(disruptions=2)
    job.connect(0, 1, 2)
    job.join(0, 2)
    for number in range(2):
        job.join(1, failures=[unhealthy(1)])
        sent_away = job.ended(1)
        assert (sent_away.outcome, sent_away.code) == ("replaced", ExitCode.UNUSABLE)
        assert job.log[-1] == "worker-1 is on an unhealthy node: GPU 3 is lost; another pod has to replace it"
        job.leader.disconnected(1, "it closed the connection", job.now, closed=True)
        job.connect(1, incarnation=f"incarnation {number}")
        job.wait(35.0)
    job.join(1)
    job.wait(5)
    attempt = job.latest(0).history[-1]
    assert (attempt.number, attempt.restarts, attempt.disruptions) == (2, 0, 2)
    assert [each.failure and each.failure.kind for each in job.latest(0).history] == [
        Kind.UNHEALTHY,
        Kind.UNHEALTHY,
        None,
    ]


def test_a_job_whose_pod_0_is_on_an_unhealthy_node_ends() -> None:
    job = Job()
    job.connect(0, 1, 2)
    job.join(1, 2)
    job.join(0, failures=[unhealthy(0)])
    record = job.ended()
    assert (record.outcome, record.code) == ("failed", ExitCode.INFRASTRUCTURE)
    assert record.failure
    assert record.failure.summary == "worker-0 is on an unhealthy node: GPU 3 is lost"
    assert record.no_retry_reason == "not retried: pod 0 leads the job, and would start on the same node again"


def test_a_fault_that_is_found_after_an_attempt_is_why_the_connection_broke(job: Job) -> None:
    job.start()
    lost = job.fail(0, secondary=True)
    job.wait(1)
    job.join(0, 2, failures=[lost])
    job.join(1, failures=[unhealthy(1, attempt=0)])
    assert job.ended(1).outcome == "replaced"
    job.leader.disconnected(1, "it closed the connection", job.now, closed=True)
    job.arrive(1, incarnation="second")
    first, second = job.latest(1).history
    assert first.failure
    assert (first.failure.kind, first.failure.node) == (Kind.UNHEALTHY, "node-b")
    assert second.disruptions == 1


@pytest.mark.parametrize("message", [each for each in EXAMPLES if isinstance(each, FromMember)], ids=repr)
def test_no_value_that_a_member_may_send_ends_the_leader(message: Message) -> None:
    """What cannot be decoded does not reach the leader."""
    name, fields = json.loads(MESSAGES.encode(message))
    if "attempt" in fields:
        fields["attempt"] = 0
    for data in mutants(MESSAGES.decode(json.dumps([name, fields]).encode())):
        try:
            found = MESSAGES.decode(data)
        except MessageError:
            continue
        for when in ("joining", "running", "stopping", "between"):
            job = Job(disruptions=100)
            if when != "joining":
                job.start()
            else:
                job.connect(*job.sent)
            if when == "stopping":
                job.leader.received(2, PreemptionRequest(0, RAISED), job.now)
            if when == "between":
                job.fail(2)
            job.leader.received(1, found, job.now)
            for pod in job.sent.keys() - {1} if isinstance(found, Join) else job.sent:
                job.leader.received(pod, Join(f"worker-{pod}", "node", memory=Inventory("10.0.0.1", 1)), job.now)
            for _ in range(4):
                due = job.leader.due()
                job.now = job.now + 1.0 if due is None else max(job.now, due)
                job.leader.tick(job.now)
            job.join(*job.sent)


def test_an_attempt_restores_no_checkpoint_that_the_one_before_could_not_read() -> None:
    job = Job(pods=2)
    checkpoints = [CheckpointId("some", step, 2, step) for step in (5, 10)]
    shards = [ShardId(each, rank) for each in checkpoints for rank in range(2)]

    def restored() -> int:
        for pod in range(2):
            job.leader.received(pod, Join(f"worker-{pod}", "node", memory=Inventory.of("", 1, shards)), job.now)
        job.wait(60)
        plan = job.sent[0][-2]
        assert isinstance(plan, MemoryPlan)
        assert plan.restore
        return plan.restore.checkpoint.step

    job.connect(0, 1)
    assert restored() == 10
    job.leader.received(1, Unreadable(7, checkpoints[0]), job.now)  # of a former attempt
    job.leader.received(1, Unreadable(0, checkpoints[1]), job.now)
    job.leader.received(1, FailureReport(0, replace(RAISED, kind=Kind.STORAGE)), job.now)
    assert restored() == 5
    assert "the checkpoint in memory after step 10 could not be read: step 5 is restored" in job.log
