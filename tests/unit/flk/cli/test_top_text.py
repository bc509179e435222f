"""The text of `flk top` at fixed widths, whole: with and without telemetry, slow ranks, a thousand pods."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest
from syrupy.assertion import SnapshotAssertion

from flk.cli.top_text import Line, TopData, job_lines, pace_of, sparkline
from flk.jobs.state import Phase, State
from flk.observe.progress import Progress
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.contract.status import RankStatus
from flk_runtime.contract.telemetry import (
    PODS_LIMIT,
    RANKS_LIMIT,
    GpuUsage,
    PodUsage,
    Sample,
    Telemetry,
)
from tests.support.jobs import NOW, JobBuilder

pytestmark = pytest.mark.usefixtures("utc")


def state(replicas: int = 4, processes: int = 2) -> State:
    builder = JobBuilder(replicas, processes)
    for index in range(replicas):
        builder.pod(index, node=f"node-{'ab'[index % 2]}")
    builder.record = JobRecord("running", 0, attempts=[Attempt(0, NOW - 50, NOW - 20), Attempt(1, NOW - 18)])
    return builder.state()


def telemetry(pods: int = 4, processes: int = 2, slow: int = 3) -> Telemetry:
    """Loss falls, the throughput rises, the second half is attempt 2; one rank is slow."""
    history = [
        Sample(
            NOW - 50 + each,
            each // 25,
            each * 10,
            loss=4.0 - each / 20,
            samples_per_s=800.0 + 4 * each,
            step_seconds=0.41,
            mfu=0.38,
        )
        for each in range(50)
    ]
    ranks = [
        RankStatus(
            each,
            each // processes,
            490 if each != slow else 488,
            "step",
            0.41,
            0.6 if each != slow else 0.97,
            1.8 if each == slow else None,  # as the launchers tell it
            3 << 30,
            0.05 * each,
        )
        for each in range(pods * processes)
    ]
    ranks.sort(key=lambda rank: -(rank.slow or 0))
    usage = [
        PodUsage(each, f"gpt-worker-{each}", f"node-{'ab'[each % 2]}", NOW, 3.5, 8.0, 6 << 30, 16 << 30)
        for each in range(pods)
    ]
    usage[0] = replace(usage[0], gpus=[GpuUsage(0.97, 60 << 30, 80 << 30), GpuUsage(0.4, 10 << 30, 80 << 30)])
    return Telemetry(NOW, 1, 1000, history, ranks[:RANKS_LIMIT], usage[:PODS_LIMIT])


def text(lines: list[Line]) -> str:
    marks = {"bad": "!", "good": "+", "warn": "*", "bold": "#", "dim": ".", "": " "}
    return "".join(f"{marks[line.style]} {line.text}\n" for line in lines)


def test_a_loss_that_is_no_number_is_said() -> None:
    found = replace(telemetry(), diverged=1200)
    assert "! the loss is infinite or no number since step 1,200" in text(job_lines(TopData(state(), NOW, found), 100))


@pytest.mark.parametrize(("phase", "seconds"), [(Phase.RUNNING, 0.5), (Phase.FAILED, 0.5), (Phase.RUNNING, 0.0)])
def test_only_a_job_that_goes_on_at_a_known_pace_has_time_left(phase: Phase, seconds: float) -> None:
    """Two lines of metrics may be too close together to tell the time of a step: 0.0."""
    made = replace(state(), phase=phase, progress=[Progress(0, 40, NOW, 100, seconds)])
    said = text(job_lines(TopData(made, NOW), 100))
    assert ("s left" in said) == (phase == Phase.RUNNING and seconds > 0)
    assert ("s/step" in said) == (seconds > 0)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_job(snapshot: SnapshotAssertion, width: int) -> None:
    lines = job_lines(TopData(state(), NOW, telemetry()), width)
    assert max(len(line.text) for line in lines) <= width
    assert text(lines) == snapshot


def test_a_rank_has_the_gpu_of_its_place_where_there_is_one_for_each() -> None:
    found = telemetry(2)
    lines = [line.text for line in job_lines(TopData(state(2), NOW, found), 100)]
    (header,) = (each for each in lines if "RANK" in each)
    at = header.index("GPU")
    ranks = [each for each in lines if re.match(r"[> ] +\d", each)]
    assert [each[at:].split()[0] for each in ranks] == ["-", "-", "97%", "40%"]
    pods = [replace(each, gpus=each.gpus[:1]) for each in found.pods]
    lines = [line.text for line in job_lines(TopData(state(2), NOW, replace(found, pods=pods)), 100)]
    assert not [each for each in lines if "RANK" in each and "GPU" in each]


def test_a_job_in_an_outage(snapshot: SnapshotAssertion) -> None:
    data = TopData(state(), NOW, telemetry(), outage="no answer for 12 s, this is the last one: refused")
    assert text(job_lines(data, 120)) == snapshot


def test_a_job_without_telemetry_shows_its_pods_and_says_why(snapshot: SnapshotAssertion) -> None:
    found = JobBuilder(3).pod(0).pod(1).ended(2, 1, "boom").state()
    found = replace(found, progress=[Progress(0, 40, NOW, 100, 0.5, loss=2.25, samples_per_s=64.0)])
    lines = job_lines(TopData(found, NOW, missing="the flk of this job measures none"), 100)
    assert text(lines) == snapshot


def test_a_thousand_pods_take_bounded_rows_and_little_time() -> None:
    data = TopData(state(1000, 8), NOW, telemetry(1000, 8))
    began = time.process_time()
    lines = job_lines(data, 200)
    assert time.process_time() - began < 0.5
    assert len(lines) < RANKS_LIMIT + PODS_LIMIT + 30
    assert lines[-1].text == f"and {8000 - RANKS_LIMIT:,} more ranks, none of them slower"
    assert "slow: 1.8 times the median" in next(line.text for line in lines if line.text.startswith(">"))
    plain = job_lines(replace(data, telemetry=None), 200)
    assert plain[-1].text == "and 999 more pods (flk status -o wide shows all)"


def running() -> State:
    return replace(state(), progress=[Progress(0, 1200, NOW, 5000, 0.41, loss=2.31, samples_per_s=12345.0)])


def test_a_sparkline() -> None:
    assert sparkline([0.0, 7.0, None, float("inf"), 3.5]) == "▁█ █▅"
    assert sparkline([2.0, 2.0]) == "▄▄"
    assert sparkline([None]) == " "


def test_the_pace_comes_from_telemetry_before_metrics() -> None:
    found = pace_of(running(), telemetry())
    assert found is not None
    assert (found.step, found.total, found.step_time) == (490, 1000, 0.41)
    assert found.remaining == pytest.approx(510 * 0.41)
    assert pace_of(running(), None) == running().progress[0]
    assert pace_of(state(), Telemetry(NOW)) is None


def test_a_job_that_tells_only_steps_has_their_rate_as_throughput() -> None:
    history = [Sample(NOW + each, 0, 10 + each, step_seconds=each or None) for each in range(4)]
    lines = [line.text for line in job_lines(TopData(running(), NOW, Telemetry(NOW, 0, 100, history)), 80)]
    assert [line for line in lines if line.startswith("steps/s 0.3333 ")] == [f"{'steps/s 0.3333':22} █▃▁"]


def axis_of(*times: float) -> str:
    """The line with the axis of time of a job whose samples have these times; the last two are of a second attempt."""
    last = len(times) - 2
    history = [Sample(NOW + time, int(each >= last), each, loss=1.0) for each, time in enumerate(times)]
    lines = [line.text for line in job_lines(TopData(running(), NOW, Telemetry(NOW, 0, 100, history)), 80)]
    return next(line for line in lines if "─" in line)


def test_a_clock_may_go_back() -> None:
    """It is set, or pod 0 comes to a node whose clock is behind."""
    assert axis_of(0, 10, 20, 5, 15).endswith(" ─|───")


def test_the_axis_of_a_job_of_days_has_dates() -> None:
    assert re.match(r"\d\d:\d\d:\d\d to \d\d:\d\d:\d\d ", axis_of(0, 10, 20))
    assert re.match(r"\d\d-\d\d to \d\d-\d\d ", axis_of(0, 100_000, 200_000))
