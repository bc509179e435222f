"""The failure that led to all others: errors in logs, and attempts that end one after the other without a step."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk.health import diagnose, find
from flk.health.failure import find_errors
from flk.jobs.state import Phase, derive
from flk.observe.progress import Progress
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, Standstill
from tests.support.jobs import NOW, JobBuilder, record


def raised(error: BaseException) -> list[str]:
    try:
        raise error
    except BaseException as caught:
        return "".join(traceback.format_exception(caught)).splitlines()


def test_an_exception_between_other_lines() -> None:
    lines = ["step 1", *raised(ValueError("sample 371 has no label")), "bye"]
    (error,) = find_errors(lines)
    assert (error.begin, lines[error.end]) == (1, "bye")
    assert error.summary == "ValueError: sample 371 has no label"
    assert not error.secondary


def test_prefix_of_torch_and_a_qualified_name() -> None:
    lines = [f"[rank1]: {line}" for line in raised(RuntimeError("x"))]
    lines[-1] = "[rank1]: torch.distributed.DistBackendError: NCCL error in: x.cpp:1"
    (error,) = find_errors(lines)
    assert (error.type, error.secondary, error.end) == ("DistBackendError", True, len(lines))


def test_chained_exceptions_are_one() -> None:
    try:
        try:
            raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer")
        except RuntimeError as cause:
            raise ValueError("no gradients") from cause
    except ValueError as error:
        lines = "".join(traceback.format_exception(error)).splitlines()
    (found,) = find_errors([*lines, *raised(KeyError("other"))])[:1]
    assert (found.type, found.begin, found.secondary) == ("ValueError", 0, True)
    assert [e.type for e in find_errors([*lines, *raised(KeyError("other"))])] == ["ValueError", "KeyError"]


def test_native_errors() -> None:
    lines = ["Fatal Python error: Segmentation fault", "", "Current thread (most recent call first):"]
    assert [e.summary for e in find_errors(lines)] == ["Fatal Python error: Segmentation fault"]


def test_a_cut_traceback_is_none() -> None:
    assert find_errors(["Traceback (most recent call last):", '  File "train.py", line 1, in <module>']) == []


@given(st.lists(st.sampled_from(["Traceback (most recent call last):", "  x", "ValueError: a", "", "\t", "[rank1]: "])))
def test_any_lines_give_errors_within_them(lines: list[str]) -> None:
    for error in find_errors(lines):
        assert 0 <= error.begin < error.end <= len(lines)


RAISED = Failure(Kind.EXCEPTION, 1, 1, "gpt-worker-1", "node-a", 0, NOW - 45, "ValueError", "no label")
RESIZED = Failure(Kind.RESIZED, 0)


def job(steps: list[int | None], *, runs: bool = True, seconds: float = 1.0, **attempt: Any) -> JobBuilder:
    """A job whose attempts each ended after so many steps; another one runs now (``runs``)."""
    builder = JobBuilder().all("pod").condition("Running")
    began = NOW - 10 - seconds * (len(steps) + 1)
    attempts = [
        Attempt(n, began + n * seconds, began + (n + 1) * seconds, replace(RAISED, attempt=n), step=step, **attempt)
        for n, step in enumerate(steps)
    ]
    current = [Attempt(len(steps), NOW - 10)] if runs else []
    builder.record = replace(record(None, RAISED, outcome="running"), attempts=[*attempts, *current])
    return builder


def codes(builder: JobBuilder, **around: Any) -> list[str]:
    return [finding.code for finding in find(builder.view(**around))]


@pytest.mark.parametrize("steps", [[0] * 6, [None] * 6, [5, *[5] * 6], [9, 3, 9, 9, 1, 2, 9]])
def test_a_job_that_restarts_without_a_further_step_says_so(steps: list[int | None]) -> None:
    view = job(steps).view()
    answer, state = diagnose(view), derive(view)
    assert answer.cause
    assert answer.cause.code == "NoProgress"
    assert answer.summary.startswith("6 attempts in a row ended without a further step (attempts ")
    assert answer.summary.endswith("the last one with: rank 1 in gpt-worker-1 raised ValueError: no label")
    assert (state.phase, state.reason) == (Phase.RUNNING, "NoProgress")
    assert not answer.stuck  # another attempt may get further


def test_between_two_attempts_it_restarts() -> None:
    state = job([0, 0, 0], runs=False).state()
    assert (state.phase, state.reason) == (Phase.RESTARTING, "NoProgress")


@pytest.mark.parametrize("steps", [[0, 0], [1, 2, 3, 4], [0, 0, 0, 7], [0, 7, 0, 0]])
def test_two_attempts_or_a_further_step_are_no_cause(steps: list[int | None]) -> None:
    assert codes(job(steps)) == []


def test_a_long_attempt_of_a_script_that_tells_no_steps_may_have_made_some() -> None:
    assert codes(job([None] * 4, seconds=119)) == ["NoProgress"]
    assert codes(job([None] * 4, seconds=120)) == []


def test_the_running_attempt_may_get_further() -> None:
    stopped = job([4, 4, 4, 4])
    assert codes(stopped, progress=[Progress(0, 4, NOW - 1)]) == ["NoProgress"]
    assert codes(stopped, progress=[Progress(0, 5, NOW - 60)]) == ["NoProgress"]  # of an earlier attempt
    assert codes(stopped, progress=[Progress(0, 5, NOW - 1)]) == []
    view = stopped.view()
    view.now = NOW + 200  # longer than any attempt before
    assert find(view) == []


def test_attempts_that_pods_joined_or_left_do_not_count() -> None:
    builder = job([0] * 5)
    assert builder.record
    resized = [replace(each, failure=RESIZED if each.failure else None) for each in builder.record.attempts]
    builder.record = replace(builder.record, attempts=resized)
    assert codes(builder) == []


def test_a_job_in_which_all_wait_names_the_rank_that_they_wait_for() -> None:
    text = "rank 1 waits for rank 0, which did not reach init_process_group; it is at train.py:2: time.sleep(300)"
    builder = JobBuilder(2).all("pod").condition("Running")
    running = record(None, None, outcome="running")
    builder.record = replace(running, standstill=Standstill(NOW - 40, text, "gpt-worker-0"))
    answer, state = diagnose(builder.view()), builder.state()
    assert answer.summary == f"no rank makes progress: {text}"
    assert (answer.cause and answer.cause.code, answer.stuck) == ("Standstill", False)
    assert (state.phase, state.reason, state.message) == (Phase.RUNNING, "Standstill", answer.summary)
    builder.record = replace(builder.record, outcome="succeeded")
    assert codes(builder) == []


def test_of_a_job_without_launchers_that_tell_it_flk_does_not_say_that_nothing_is_wrong() -> None:
    builder = JobBuilder(2).all("pod").condition("Running")
    builder.job["metadata"]["labels"] = {}
    assert diagnose(builder.view()).summary == (
        "2 pods of 2 run, without a launcher that tells whether their ranks make progress: flk stacks gpt -n team "
        "shows what they do"
    )
