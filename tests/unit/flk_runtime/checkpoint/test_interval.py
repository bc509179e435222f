"""The interval between checkpoints that save_every="auto" computes."""

from __future__ import annotations

import math

import pytest

from flk_runtime.checkpoint.interval import NODE_MTTF, AutoInterval, FixedInterval, failure_interval, save_interval


@pytest.mark.parametrize(
    ("stopped", "complete", "step", "mttf", "steps"),
    [
        (2.0, 10.0, 1.0, 3600.0, 120),  # sqrt(2 * 2 * 3600)
        (2.0, 10.0, 0.5, 3600.0, 240),
        (0.0, 10.0, 1.0, 3600.0, 10),  # not before the save is complete
        (2.0, 500.0, 1.0, 3600.0, 500),
        (0.0, 0.0, 1.0, 3600.0, 1),
    ],
)
def test_interval(stopped: float, complete: float, step: float, mttf: float, steps: int) -> None:
    assert save_interval(stopped, complete, step, mttf) == steps


def test_the_interval_loses_the_least_time() -> None:
    def lost(interval: float) -> float:
        return 3.0 / interval + interval / 2 / 7200.0  # share of the time: saves, and half an interval per failure

    best = save_interval(3.0, 0.0, 1.0, 7200.0)
    assert lost(best) <= min(lost(best - 5), lost(best + 5))


def test_failures_shorten_the_expected_time_and_training_without_any_lengthens_it() -> None:
    assert failure_interval(1, 0, 0.0) == NODE_MTTF
    assert math.isclose(failure_interval(100, 0, 0.0), NODE_MTTF / 100)
    assert failure_interval(4, 3, 86400.0) < failure_interval(4, 0, 86400.0)
    assert failure_interval(4, 0, 86400.0) > failure_interval(4, 0, 0.0)


@pytest.mark.parametrize(
    ("every", "before", "steps", "passed"),
    [(10, 9, 10, True), (10, 10, 11, False), (10, 8, 23, True), (10, 11, 19, False), (0, 9, 10, False)],
)
def test_a_save_is_due_also_where_one_call_does_many_steps(every: int, before: int, steps: int, passed: bool) -> None:
    assert FixedInterval(every).is_due(before, steps) == passed


def test_a_save_that_failed_is_forgotten_when_a_later_one_is_complete() -> None:
    interval = AutoInterval(0, 1, 0)
    for step in (10, 20, 30):
        interval.begin(step)
    interval.completed(20)
    assert list(interval._begun) == [30]
