"""Elastic jobs and spares as the leader decides: who takes part, who is waited for, and when pods are admitted."""

from __future__ import annotations

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.coordinator.membership import Membership
from flk_runtime.launcher.preemption import Boundary
from flk_runtime.launcher.settings import Settings
from flk_runtime.launcher.transport.messages import (
    AttemptEnded,
    AttemptStarted,
    BoundaryReport,
    FailureReport,
    PreemptionRequest,
    PreemptionStarted,
    RanksEnded,
    Restored,
    SaveAt,
    Stopping,
    SuccessReport,
)
from tests.unit.flk_runtime.launcher.coordinator.test_leader import Job


def test_no_attempt_starts_without_the_pod_that_leads() -> None:
    """It may connect to itself later than the others do."""
    membership = Membership(Settings(("train.py",), pods=3, spares=1))
    assert membership.ready_at({1, 2}, {1, 2}, 1.0) is None
    assert membership.ready_at({0, 2}, {0, 2}, 1.0) == 1.0


def without_all(pods: int, *arrived: int, **limits: int) -> Job:
    """An elastic job that trains with those of its pods that have arrived: the last call is over."""
    job = Job(pods, least=2, **limits)
    job.arrive(*arrived)
    job.wait(5.0)
    return job


def group_ranks(job: Job) -> dict[int, int]:
    """The group rank of each pod that takes part in the attempt that runs."""
    started = {pod: job.latest_or_none(pod) for pod in job.sent}
    number = max(message.number for message in started.values() if message)
    return {pod: message.pods.index(pod) for pod, message in started.items() if message and message.number == number}


def save_and_end(job: Job, pods: list[int], attempt: int, step: int = 7) -> None:
    """The pods do what PreemptionStarted asks for."""
    for pod in pods:
        assert isinstance(job.sent[pod][-1], PreemptionStarted)
        job.leader.received(pod, BoundaryReport(attempt, [Boundary(step, True)]), job.now)
    for pod in pods:
        assert job.sent[pod][-1] == SaveAt(attempt, step)
        job.leader.received(pod, RanksEnded(attempt, step), job.now)


def stop(job: Job, pod: int, attempt: int) -> None:
    """The launcher of a pod has received SIGTERM."""
    failure = Failure(Kind.PREEMPTED, pod, pod_name=f"worker-{pod}", attempt=attempt, message="received SIGTERM")
    job.leader.received(pod, PreemptionRequest(attempt, failure), job.now)


def causes(job: Job) -> list[tuple[str, str]]:
    """Size and cause of each attempt that has ended."""
    return [(each.pods, each.failure.summary) for each in job.latest(0).history if each.failure]


def test_an_elastic_job_starts_with_the_least_number_of_pods_after_the_last_call() -> None:
    job = Job(4, least=2)
    job.connect(0, 2)
    job.join(0)
    job.wait(20.0)
    job.join(2)
    job.wait(4.0)
    job.arrive(3)  # which prolongs nothing
    job.wait(0.9)
    assert job.sent[0] == []
    job.wait(0.1)
    assert group_ranks(job) == {0: 0, 2: 1, 3: 2}
    assert (job.latest(2).pods, job.latest(2).history[0].pods) == ([0, 2, 3], "0,2-3")
    job.fail(2)
    job.join(0, 2, 3)
    assert job.latest(2).number == 1, "nobody waits again for a pod that has never come"


def test_pods_that_are_missing_are_told_with_the_number_that_is_needed() -> None:
    job = Job(4, least=2)
    job.connect(0)
    job.join(0)
    job.wait(60.0)
    assert "never joined: waited 60 s for pods 1-3 of 4 (2 are needed)" in job.ended().to_json()


def test_a_lost_pod_is_waited_for_for_the_last_call_and_uses_a_disruption() -> None:
    job = Job(4, least=2)
    job.start()
    job.leader.disconnected(1, "it closed the connection", job.now)
    job.join(0, 2, 3)
    job.wait(4.9)
    assert job.latest_or_none(0) is None
    job.wait(0.1)
    assert group_ranks(job) == {0: 0, 2: 1, 3: 2}
    assert job.latest(0).history[-1].disruptions == 1


def test_pods_that_end_their_ranks_are_waited_for_longer_than_the_last_call() -> None:
    job = Job(4, least=2)
    job.start()
    job.fail(1)
    job.join(0, 2)
    job.wait(20.0)
    assert job.latest_or_none(0) is None
    job.join(1, 3)
    assert group_ranks(job) == {0: 0, 1: 1, 2: 2, 3: 3}


def test_pods_that_have_to_stop_are_not_waited_for_and_use_no_budget() -> None:
    job = Job(4, least=2, restarts=0, disruptions=0)
    job.start()
    stop(job, 3, 0)
    stop(job, 2, 0)  # while the ranks save
    job.leader.received(2, Stopping(), job.now)
    save_and_end(job, [0, 1, 2, 3], 0)
    assert isinstance(job.sent[0][-1], AttemptEnded)
    job.leader.disconnected(3, "it closed the connection", job.now)
    job.join(0, 1)  # the launcher of pod 2 is still there
    assert group_ranks(job) == {0: 0, 1: 1}
    job.leader.disconnected(2, "it closed the connection", job.now)
    assert group_ranks(job) == {0: 0, 1: 1}
    assert causes(job) == [("0-3", "worker-3 received SIGTERM; saved after step 7")]
    assert (job.latest(0).history[-1].restarts, job.latest(0).history[-1].disruptions) == (0, 0)


def test_a_pod_that_has_to_stop_after_another_is_not_waited_for_and_uses_no_budget() -> None:
    """`flk scale 4 → 2`, and the kubelets are a second apart: the attempt has ended before the second SIGTERM."""
    job = Job(4, least=2, restarts=0, disruptions=0)
    job.start()
    stop(job, 3, 0)
    save_and_end(job, [0, 1, 2, 3], 0)
    job.join(0, 1)
    job.leader.received(2, Stopping(), job.now)
    assert group_ranks(job) == {0: 0, 1: 1}
    job.leader.disconnected(2, "it closed the connection", job.now)
    assert causes(job) == [("0-3", "worker-3 received SIGTERM; saved after step 7")]


def test_an_attempt_that_starts_with_a_pod_that_has_to_stop_ends_without_a_loss() -> None:
    job = Job(4, least=2, restarts=0, disruptions=0)
    job.start()
    job.leader.received(3, Stopping(), job.now)
    job.leader.disconnected(3, "it closed the connection", job.now)
    job.join(0, 1, 2)
    assert group_ranks(job) == {0: 0, 1: 1, 2: 2}
    assert causes(job) == [("0-3", "worker-3 on node received a signal to stop")]
    job.leader.received(2, SuccessReport(1), job.now)
    job.leader.received(2, Stopping(), job.now)  # its ranks have succeeded, so the attempt goes on
    job.latest(0)


def test_pods_that_join_are_admitted_at_a_step_boundary_together() -> None:
    job = without_all(4, 0, 1, restarts=0, disruptions=0)
    job.arrive(3)
    job.wait(0.4)
    job.latest(0)
    job.wait(0.1)
    (message,) = [each for each in job.sent[1] if isinstance(each, PreemptionStarted)]
    assert not message.urgent
    job.connect(2)
    job.join(2)  # while the others save
    save_and_end(job, [0, 1], 0)
    job.join(0, 1)
    assert group_ranks(job) == {0: 0, 1: 1, 2: 2, 3: 3}
    assert causes(job) == [("0-1", "worker-3 on node joined: 2 → 3 pods; saved after step 7")]
    assert (job.latest(0).history[-1].restarts, job.latest(0).history[-1].disruptions) == (0, 0)


def test_the_last_pods_that_can_join_are_admitted_without_a_delay() -> None:
    job = without_all(3, 0, 1)
    job.arrive(2)
    job.leader.disconnected(2, "it closed the connection", job.now)
    job.wait(1.0)
    job.arrive(2)
    assert job.leader.due() == job.now
    job.wait(0.0)
    assert isinstance(job.sent[0][-1], PreemptionStarted)
    assert job.sent[2] == []


def test_a_pod_that_has_to_stop_while_another_one_is_admitted_makes_that_urgent() -> None:
    job = without_all(3, 0, 1)
    job.arrive(2)
    job.wait(0.0)
    stop(job, 1, 0)
    stop(job, 1, 0)
    assert [each.urgent for each in job.sent[0] if isinstance(each, PreemptionStarted)] == [False, True]


def test_a_pod_that_is_lost_while_another_one_is_admitted_is_the_cause() -> None:
    job = without_all(4, 0, 1, 2)
    job.arrive(3)
    job.wait(0.0)
    job.leader.disconnected(1, "it was silent for 15 s", job.now)
    job.join(0, 2)
    job.wait(5.0)
    assert causes(job) == [("0-2", "worker-1 lost the connection to pod 0: it was silent for 15 s")]


def test_no_pod_is_admitted_when_a_pod_has_succeeded() -> None:
    job = without_all(3, 0, 1)
    job.leader.received(1, SuccessReport(0), job.now)
    job.arrive(2)
    job.wait(10.0)
    assert isinstance(job.sent[0][-1], AttemptStarted)
    job.leader.received(0, SuccessReport(0), job.now)
    assert job.ended(2).outcome == "succeeded"


def test_a_new_leader_waits_for_the_pods_of_the_attempt_that_ran() -> None:
    job = Job(4, least=2)
    lost = Failure(Kind.LOST, 0, attempt=8, message="closed the connection to the rendezvous")
    known = [Attempt(8, 1.0, 99.0, lost, 0, 2, pods="0-1,3-4")]  # 4 is no pod of this job
    job.connect(0, 1, 3)
    job.join(0)
    job.join(1, history=known)
    job.join(3, history=known)
    assert group_ranks(job) == {0: 0, 1: 1, 3: 2}
    assert job.latest(0).number == 9


def test_a_spare_takes_the_place_of_a_lost_pod_at_once_and_that_one_becomes_the_spare() -> None:
    job = Job(4, spares=1)
    job.start()
    assert group_ranks(job) == {0: 0, 1: 1, 2: 2}
    assert job.sent[3] == []
    job.leader.disconnected(1, "it closed the connection", job.now)
    job.join(0, 2)
    assert group_ranks(job) == {0: 0, 3: 1, 2: 2}
    assert job.latest(0).history[-1].pods == "0,3,2"
    job.arrive(1, incarnation="second")
    job.wait(30.0)
    assert group_ranks(job) == {0: 0, 3: 1, 2: 2}
    job.leader.disconnected(3, "it closed the connection", job.now)
    job.join(0, 2)
    job.wait(1.0)  # the delay after two quick failures in a row
    assert group_ranks(job) == {0: 0, 1: 1, 2: 2}


def test_a_spare_that_is_lost_does_not_end_the_attempt_and_knows_the_end_of_the_job() -> None:
    job = Job(4, spares=1)
    job.start()
    job.leader.disconnected(3, "it closed the connection", job.now)
    job.arrive(3, incarnation="second")
    for pod in (0, 1, 2):
        job.leader.received(pod, SuccessReport(0), job.now)
    assert job.ended(3).outcome == "succeeded"


def test_a_pod_on_a_node_where_pods_failed_repeatedly_is_used_last() -> None:
    job = Job(4, spares=1)
    job.connect(0, 1, 2)
    job.join(0, 1)
    job.join(2, node="bad")
    job.arrive(3)
    for attempt in (0, 1):
        assert group_ranks(job) == {0: 0, 1: 1, 2: 2}
        failure = Failure(Kind.IO, 2, 2, "worker-2", "bad", attempt, job.now, "OSError", step=attempt)
        job.leader.received(2, FailureReport(attempt, failure), job.now)
        job.join(0, 1)
        job.join(2, node="bad")
    assert group_ranks(job) == {0: 0, 1: 1, 3: 2}


def test_a_pod_that_is_needed_stays_on_a_node_in_quarantine() -> None:
    job = Job(pods=2)
    job.connect(0, 1)
    job.join(0)
    job.join(1, node="node-b")
    for attempt in (0, 1):
        failure = Failure(Kind.IO, 1, 1, "worker-1", "node-b", attempt, 1.0)
        job.leader.received(1, FailureReport(attempt, failure), job.now)
        job.join(0)
        job.join(1, node="node-b")
        job.wait(60)
        job.leader.received(0, Restored(attempt + 1, 0, "start"), job.now)
    assert group_ranks(job) == {0: 0, 1: 1}
