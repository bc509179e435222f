"""Progress of ranks, from the lines of metrics in a log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flk.jobs.logs import LogPosition
from flk.observe.progress import read_progress, read_telemetry_of, split_stamp


def line(second: int, text: str, zone: str = "Z") -> str:
    return f"2026-01-01T00:00:{second:02}.123456789{zone} {text}"


@pytest.mark.parametrize("zone", ["Z", "+02:00", "-03:30"])  # a kubelet writes that of its node
def test_step_time_is_that_between_two_lines(zone: str) -> None:
    found = read_progress(
        [
            line(10, '[rank 0] {"step": 10, "loss": 2.5}', zone),
            line(12, "[rank 0] saving", zone),
            line(15, '[rank 0] {"step": 20, "loss": 2.25, "samples_per_s": 64.0, "total": 100}', zone),
        ]
    )
    assert [(p.rank, p.step, p.step_time, p.loss, p.samples_per_s) for p in found] == [(0, 20, 0.5, 2.25, 64.0)]
    assert found[0].remaining == 40
    assert replace(found[0], step_time=0.0).remaining is None  # and not that the job is about to end


def test_ranks_are_told_apart() -> None:
    lines = [line(1, '[rank 3] {"step": 4}'), line(2, '[rank 1] {"step": 5, "loss": "low"}')]
    assert [(p.rank, p.step, p.loss) for p in read_progress(lines)] == [(1, 5, None), (3, 4, None)]


def test_a_restart_begins_at_a_lower_step() -> None:
    lines = [line(1, '[rank 0] {"step": 50}'), line(9, '[rank 0] {"step": 40}')]
    assert [(p.step, p.step_time) for p in read_progress(lines)] == [(40, None)]


@pytest.mark.parametrize(
    "text", ['{"step": "x"}', '{"step": true}', "{step: 1}", '[{"step": 1}]', '{"epoch": 1}', "", "{}"]
)
def test_other_lines_are_no_metrics(text: str) -> None:
    assert read_progress([line(1, text)]) == []


def test_two_lines_of_a_step_are_told_together() -> None:
    """A script prints the loss of a step, and then what an evaluation has found."""
    lines = [line(1, '[rank 0] {"step": 9, "loss": 2.5}'), line(3, '[rank 0] {"step": 10, "loss": 2.25}')]
    lines += [
        line(5, '[rank 0] {"step": 10, "validation": 0.5, "tokens_per_s": 8}'),
        line(6, '[rank 1] {"step": 10, "loss": 9.5}'),
    ]
    found, _ = read_progress(lines)
    assert (found.step, found.loss, found.step_time) == (10, 2.25, 2.0)
    samples = read_telemetry_of(lines, 0.0).history
    assert [(each.step, each.loss, each.tokens_per_s) for each in samples] == [(9, 2.5, None), (10, 2.25, 8.0)]


def test_time_stamps_are_taken_off() -> None:
    text = "hello 2026-01-01T00:00:00Z "
    assert split_stamp(f"2026-01-01T00:00:01.123Z {text}".encode()) == ("2026-01-01T00:00:01.123Z", text)


def test_words_of_the_kubelet_have_none() -> None:
    assert split_stamp(b"unable to retrieve container logs") == ("", "unable to retrieve container logs")
    assert LogPosition().accept(b"unable to retrieve container logs")
