"""Measurements from the lines of metrics in a log."""

from __future__ import annotations

from flk.jobs.logs import LogLine
from flk.report.history import telemetry_of, thinned
from flk_runtime.contract.telemetry import HISTORY_LIMIT, Sample


def line(step: int, second: int, *, rank: int = 0, attempt: int = 1, more: str = "") -> LogLine:
    time = f"2026-01-01T00:{second // 60:02}:{second % 60:02}.000000000Z" if second >= 0 else ""
    return LogLine(f'{{"step": {step}, "loss": {10 - step}{more}}}', rank=rank, attempt=attempt, time=time)


def test_lines_of_metrics_are_samples() -> None:
    told = telemetry_of([LogLine("hello"), line(1, 0, more=', "total_steps": 9'), line(3, 4, attempt=2)])
    assert told
    assert [(each.step, each.loss, each.attempt) for each in told.history] == [(1, 9, 1), (3, 7, 2)]
    assert told.history[1].step_seconds == 2
    assert told.total_steps == 9


def test_of_several_ranks_the_first_that_prints_counts() -> None:
    told = telemetry_of([line(1, 0, rank=2), line(1, 1, rank=3), line(2, 2, rank=2)])
    assert told
    assert [each.time % 60 for each in told.history] == [0, 2]


def test_lines_without_times_have_steps_only() -> None:
    told = telemetry_of([line(1, -1), line(2, -1)])
    assert told
    assert [(each.step, each.time, each.step_seconds) for each in told.history] == [(1, 0, None), (2, 0, None)]


def test_other_lines_are_none() -> None:
    assert telemetry_of([LogLine("step 3"), LogLine('{"step": "x"}')]) is None


def test_samples_are_bounded_and_the_last_one_stays() -> None:
    kept = thinned([Sample(step, 0, step) for step in range(7 * HISTORY_LIMIT)])
    assert len(kept) == HISTORY_LIMIT
    assert (kept[0].step, kept[-1].step) == (0, 7 * HISTORY_LIMIT - 1)
