"""The history of a job: bounded, in the order of steps, over attempts."""

from __future__ import annotations

import pytest

from flk_runtime.contract.telemetry import Sample
from flk_runtime.launcher.telemetry.history import History


def test_a_long_history_is_merged_evenly_and_keeps_the_latest_sample() -> None:
    history = History(limit=10)
    for step in range(1, 1001):
        history.add(Sample(float(step), 0, step, loss=float(step)))
    found = history.samples()
    assert 5 <= len(found) <= 11
    assert found[-1] == Sample(1000.0, 0, 1000, loss=1000.0)
    steps = [sample.step for sample in found]
    assert steps == sorted(steps)
    gaps = [after - before for before, after in zip([0, *steps[:-2]], steps[:-1], strict=True)]
    assert max(gaps[:-1]) <= 2 * min(gaps[:-1])
    assert found[0].loss == pytest.approx((1 + found[0].step) / 2)  # the mean of the samples that it stands for


def test_steps_that_are_done_again_replace_the_former_ones() -> None:
    history = History(samples=[Sample(step, 0, step, loss=1.0) for step in range(6)])
    history.add(Sample(10, 1, 3, loss=2.0))
    assert [(each.step, each.loss) for each in history.samples()] == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_two_lines_of_a_step_become_one_sample() -> None:
    history = History(samples=[Sample(1, 0, 5, loss=1.0), Sample(2, 0, 5, mfu=0.5)])
    assert history.samples() == [Sample(2, 0, 5, loss=1.0, mfu=0.5)]


def test_a_value_that_only_some_samples_have_stays_when_they_are_merged() -> None:
    history = History(limit=2, samples=[Sample(1, 0, 1, loss=4.0), Sample(2, 0, 2), Sample(3, 0, 3)])
    assert history.samples() == [Sample(2, 0, 2, loss=4.0), Sample(3, 0, 3)]


def test_merged_samples_have_the_slower_rank_and_the_larger_memory() -> None:
    slow, quick = (
        Sample(1, 0, 1, slowest_seconds=9.0, slowest_rank=7, memory=2.0),
        Sample(2, 0, 2, slowest_seconds=1.0, slowest_rank=3, memory=5.0),
    )
    merged = History(limit=2, samples=[slow, quick, Sample(3, 0, 3)]).samples()[0]
    assert (merged.slowest_rank, merged.memory) == (7, 5.0)
