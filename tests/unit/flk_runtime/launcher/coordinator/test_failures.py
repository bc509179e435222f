"""Which of the failures that pods have reported is the root cause of an attempt's end."""

from __future__ import annotations

from dataclasses import replace

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt
from flk_runtime.launcher.coordinator.failures import Failures
from flk_runtime.launcher.transport.messages import Join

ATTEMPT = Attempt(2, 100.0, step=4)
PLACES = {0: ("train-0", "node-a"), 1: ("train-1", "node-b")}
LOST = Failure(Kind.LOST, 1, attempt=2, message="lost the connection to pod 0")
JOINED = {1: Join("train-1", "node-c", step=6)}


def explained(failures: Failures, *, joined: dict[int, Join], replaced: list[int]) -> Attempt:
    return failures.explain(ATTEMPT, joined, PLACES, replaced)


def test_an_attempt_without_failures_is_unchanged() -> None:
    assert explained(Failures(), joined=JOINED, replaced=[]) is ATTEMPT


def test_a_lost_pod_has_the_names_that_it_had_in_the_attempt() -> None:
    failures = Failures()
    failures.add(LOST)
    named = replace(LOST, pod_name="train-1", node="node-b")
    assert explained(failures, joined={}, replaced=[]).failure == named
    assert explained(failures, joined=JOINED, replaced=[]).failure == named


def test_a_lost_pod_with_another_launcher_was_restarted() -> None:
    failures = Failures()
    failures.add(LOST)
    failure = explained(failures, joined=JOINED, replaced=[1]).failure
    assert failure == replace(LOST, pod_name="train-1", node="node-b", message="was restarted")


def test_a_closed_connection_means_a_killed_container_unless_the_pod_has_reported_a_failure() -> None:
    failures = Failures()
    failures.add_closed(1)
    failures.add(LOST)
    failure = explained(failures, joined=JOINED, replaced=[1]).failure
    assert failure
    assert (failure.kind, failure.message) == (Kind.CONTAINER_KILLED, "")
    failures.clear()
    failures.add(LOST)
    failures.add_closed(1)
    failure = explained(failures, joined=JOINED, replaced=[1]).failure
    assert failure
    assert failure.kind is Kind.LOST


def test_the_step_is_the_most_that_any_pod_has_reached() -> None:
    failures = Failures()
    failures.add(replace(LOST, step=5))
    assert explained(failures, joined={}, replaced=[]).step == 5
    assert explained(failures, joined=JOINED, replaced=[]).step == 6


def test_failures_of_other_attempts_do_not_count() -> None:
    failures = Failures()
    failures.add(replace(LOST, attempt=1))
    assert explained(failures, joined=JOINED, replaced=[]) is ATTEMPT
    raised = Failure(Kind.EXCEPTION, 0, 0, attempt=2, type="ValueError")
    failures.add(LOST, raised)
    assert explained(failures, joined=JOINED, replaced=[]).failure == raised
    assert [each.attempt for each in failures] == [1, 2, 2]
