"""The charts of reports as data: which there are, of what, and that their rows are bounded."""

from __future__ import annotations

from dataclasses import replace

from flk.jobs.state import Phase, deleted
from flk.report.charts import charts_of
from flk_runtime.contract.telemetry import HISTORY_LIMIT, RANKS_LIMIT
from tests.support.reports import report, telemetry


def test_a_full_report_has_all_charts() -> None:
    keys = [chart.key for chart in charts_of(report())]
    assert keys == ["attempts", "loss", "throughput", "progress", "step-time", "memory", "ranks", "goodput"]


def test_a_report_without_measurements_has_those_of_its_record() -> None:
    assert [chart.key for chart in charts_of(report(telemetry=None))] == ["attempts", "goodput"]


def test_what_is_not_measured_has_no_chart() -> None:
    full = telemetry()
    history = [replace(each, loss=None, samples_per_s=None, tokens_per_s=None) for each in full.history]
    keys = {chart.key for chart in charts_of(report(telemetry=replace(full, history=history)))}
    assert keys.isdisjoint({"loss", "throughput"})


def test_each_attempt_is_a_line_of_its_own_so_that_steps_may_repeat() -> None:
    loss = next(chart for chart in charts_of(report()) if chart.key == "loss")
    assert loss.spec["encoding"]["detail"] == {"field": "attempt"}
    assert {row["attempt"] for row in loss.spec["data"]["values"]} == {1, 2, 3}


def test_the_slowest_rank_stands_out_by_its_work() -> None:
    ranks = next(chart for chart in charts_of(report()) if chart.key == "ranks")
    rows = ranks.spec["data"]["values"]
    assert max(rows, key=lambda row: row["seconds"])["rank"] == 9


def test_checkpoints_and_hangs_are_marks_on_the_attempts() -> None:
    _, marks = charts_of(report())[0].spec["layer"]
    found = {(row["what"], row["attempt"]) for row in marks["data"]["values"]}
    assert ("hang", "attempt 2") in found
    assert ("saved in memory", "attempt 1") in found
    assert ("saved in storage", "attempt 3") in found


def test_attempts_without_checkpoints_have_no_marks() -> None:
    made = report(telemetry=None)
    attempts = [replace(each, failure=None) for each in made.state.attempts]
    chart = charts_of(replace(made, state=replace(made.state, attempts=attempts)))[0]
    assert len(chart.spec["layer"]) == 1


def test_the_attempt_of_a_job_that_was_deleted_while_it_ran_has_a_colour() -> None:
    made = report(telemetry=None)
    last = replace(made.state.attempts[-1], outcome="running")
    gone = deleted(replace(made.state, phase=Phase.RUNNING, attempts=[last]), now=made.seen)
    chart = charts_of(replace(made, state=gone))[0]
    assert chart.spec["layer"][0]["encoding"]["color"]["scale"] == {
        "domain": ["deleted"],
        "range": ["var(--outcome-deleted)"],
    }


def test_the_rows_of_a_large_job_are_bounded() -> None:
    charts = charts_of(report(1000, telemetry=telemetry(1000, 8, HISTORY_LIMIT)))
    assert max(len(chart.spec["data"]["values"]) for chart in charts) <= max(2 * HISTORY_LIMIT, RANKS_LIMIT)


def test_lines_differ_by_more_than_their_colours() -> None:
    encoding = next(chart for chart in charts_of(report()) if chart.key == "step-time").spec["encoding"]
    dashes = encoding["strokeDash"]["scale"]
    assert dashes["domain"] == encoding["color"]["scale"]["domain"] == ["median rank", "slowest rank, work"]
    assert len({tuple(each) for each in dashes["range"]}) == 2
