"""How a launcher judges the ends of its ranks in an attempt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.launcher.agent import PodAttempt
from flk_runtime.launcher.preemption import PodPreemption
from flk_runtime.launcher.processes.output import Prefixer, RankPipes
from flk_runtime.launcher.transport.messages import AttemptStarted
from flk_runtime.shared.progress import ProgressPage

RAISED = Failure(Kind.EXCEPTION, 0, 0, type="ValueError", message="sample 7")
AGAIN = replace(RAISED, pod=1, rank=4)


@pytest.fixture
def attempt() -> PodAttempt:
    return PodAttempt(AttemptStarted(3, "10.0.0.1", 29500, [], "0"))


def test_an_exception_after_sigterm_is_an_answer_to_it_unless_another_rank_has_raised_it(attempt: PodAttempt) -> None:
    assert attempt.judge_terminated(AGAIN) == replace(AGAIN, kind=Kind.STOPPED)
    attempt.end = RAISED
    assert attempt.judge_terminated(AGAIN) == AGAIN
    attempt.end, attempt.failures = None, [RAISED]
    assert attempt.judge_terminated(AGAIN) == AGAIN
    other = replace(AGAIN, type="KeyError")
    assert attempt.judge_terminated(other).kind is Kind.STOPPED


@pytest.mark.parametrize(
    ("kind", "suspicious"),
    [(Kind.LOST, True), (Kind.CONNECTION, True), (Kind.GPU, True), (Kind.EXCEPTION, False), (Kind.RESIZED, False)],
)
def test_an_attempt_that_a_broken_node_may_have_ended_is_suspicious(
    attempt: PodAttempt, kind: Kind, suspicious: bool
) -> None:
    assert not attempt.suspicious
    attempt.end = Failure(kind, 1)
    assert attempt.suspicious == suspicious
    attempt.end, attempt.failures = None, [Failure(kind, 1)]
    assert attempt.suspicious == suspicious


@pytest.mark.parametrize(
    ("end", "printed"),
    [
        (None, ""),
        (RAISED, ""),
        (replace(RAISED, kind=Kind.HANG), ""),
        (replace(RAISED, kind=Kind.CONNECTION), "[rank 4] RuntimeError: Connection closed by peer\n"),
    ],
    ids=["runs", "exception", "hang", "broken connection"],
)
@pytest.mark.parametrize("reported_first", [True, False])
def test_the_traceback_of_a_broken_connection_is_printed_if_there_is_no_other_cause(
    attempt: PodAttempt, end: Failure | None, printed: str, reported_first: bool
) -> None:
    out: list[bytes] = []
    pipes = RankPipes(Prefixer("", out.append), Prefixer("[rank 4] ", out.append))
    pipes.close_write_ends()
    for fd in pipes.read_ends:
        pipes.close(fd)
    attempt.end = None if reported_first else end
    attempt.unprinted.append((pipes, "RuntimeError: Connection closed by peer\n"))
    attempt.print_secondary()
    attempt.end = end
    attempt.print_secondary()
    assert b"".join(out).decode() == printed


def test_a_rank_that_was_killed_after_sigterm_has_not_answered_it(attempt: PodAttempt) -> None:
    killed = Failure(Kind.OOM, 1, 4, signal=9)
    assert attempt.judge_terminated(killed) == killed


def test_a_rank_that_reached_the_step_to_stop_at_ends_as_told(attempt: PodAttempt, tmp_path: Path) -> None:
    page = ProgressPage.create(tmp_path / "page")
    page.boundary = 7
    assert not attempt.stopped_as_told(page, ExitCode.PREEMPTED)
    attempt.preemption = PodPreemption([page], 0.0)
    assert not attempt.stopped_as_told(page, ExitCode.PREEMPTED)
    attempt.preemption.stop_at(8)
    assert not attempt.stopped_as_told(page, ExitCode.PREEMPTED)
    attempt.preemption.stop_at(7)
    assert attempt.stopped_as_told(page, ExitCode.PREEMPTED)
    assert not attempt.stopped_as_told(page, ExitCode.TRAINING)


def test_the_step_of_an_attempt_is_the_furthest_that_a_rank_of_the_pod_reached(
    attempt: PodAttempt, tmp_path: Path
) -> None:
    steps = []
    for step in (-1, 7, 5):
        page = ProgressPage.create(tmp_path / str(step))
        page.step = step
        attempt.end_rank(page)
        steps.append(attempt.step)
    assert steps == [None, 7, 7]
