"""How a terminal shows the lines of a run on this machine, and the words with which it ends."""

from __future__ import annotations

import pytest

from flk.local.shown import MetricsText, Shown
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.log_format import RECORD_MARKER
from flk_runtime.contract.record import Attempt, JobRecord

METRICS = '[rank 0] {"step": 130, "total": 200, "loss": 2.396123, "samples_per_s": 258.04, "data_wait": 0.02}'


def record(*attempts: Attempt, outcome: str = "succeeded", **fields: int) -> str:
    made = JobRecord(outcome, 0, failure=attempts[-1].failure, attempts=[*attempts], **fields)
    return f"[pod 0] {RECORD_MARKER}{made.to_json()}"


def test_on_a_terminal_metrics_are_for_people_and_elsewhere_they_are_as_they_came() -> None:
    assert Shown().line(METRICS, on_terminal=False) == METRICS
    assert Shown().line(METRICS, on_terminal=True) == "[rank 0] step 130 of 200 (65%)  loss 2.396  258 samples/s"


@pytest.mark.parametrize("line", ["[rank 0] {a: 1}", "[rank 0] epoch 1", '{"loss": 1.0}'])
def test_other_lines_have_no_metrics(line: str) -> None:
    assert MetricsText().text(line) is None
    assert Shown().line(line, on_terminal=True) == line


def test_a_terminal_shows_a_failure_once_at_the_end() -> None:
    for line in ("[pod 0] attempt 1 ended: rank 0 raised KeyError", "[pod 0] failed: rank 0 raised KeyError"):
        assert Shown().line(line, on_terminal=True) is None
        assert Shown().line(line, on_terminal=False) == line


def test_the_end_says_time_steps_loss_and_checkpoint() -> None:
    shown = Shown()
    shown.line(METRICS, on_terminal=False)
    assert shown.line(record(Attempt(1, 0.0, step=200), saved=200, stored=200), on_terminal=False) is None
    assert shown.end() == "after 0s: step 200 of 200, loss 2.396, checkpoint of step 200"


def test_a_training_that_was_done_before_has_nothing_to_do() -> None:
    shown = Shown()
    shown.line(record(Attempt(1, 0.0, restored=400), saved=400), on_terminal=False)
    assert shown.end() == "nothing to do: the training is at step 400"
    shown.line('[rank 0] {"step": 410}', on_terminal=False)
    assert shown.end() == "after 0s: step 410, checkpoint of step 400 in memory"


def test_of_a_failed_job_the_time_and_the_attempts_are_said() -> None:
    shown = Shown()
    failed = Failure(Kind.EXCEPTION, 0, type="KeyError")
    shown.line(record(Attempt(1, 0.0, 1.0, failed), Attempt(2, 1.0, 2.0, failed), outcome="failed"), on_terminal=False)
    error = shown.failure("gpt")
    assert error is not None
    assert str(error).startswith("job gpt failed after 0s and 2 attempts: ")
    assert Shown().failure("gpt") is None
