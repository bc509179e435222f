"""The charts of reports as data: which there are, of what, and that their rows are bounded."""

from __future__ import annotations

from dataclasses import replace

from flk.jobs.state import Phase, deleted
from flk.report.charts import charts_of
from flk_runtime.contract.telemetry import HISTORY_LIMIT, RANKS_LIMIT
from tests.support.reports import report, telemetry


def test_a_full_report_has_all_charts() -> None:
    keys = [chart.key for chart in charts_of(report())]
    assert keys == ["attempts", "loss", "throughput", "step-time", "memory", "ranks", "goodput"]


def test_a_report_without_measurements_has_those_of_its_record() -> None:
    assert [chart.key for chart in charts_of(report(telemetry=None))] == ["attempts", "goodput"]


def test_each_attempt_is_a_line_of_its_own_so_that_steps_may_repeat() -> None:
    loss = next(chart for chart in charts_of(report()) if chart.key == "loss")
    assert loss.spec["encoding"]["detail"] == {"field": "attempt"}
    assert {row["attempt"] for row in loss.spec["data"]["values"]} == {1, 2, 3}


def test_the_slowest_rank_stands_out_by_its_work() -> None:
    ranks = next(chart for chart in charts_of(report()) if chart.key == "ranks")
    rows = ranks.spec["data"]["values"]
    assert max(rows, key=lambda row: row["seconds"])["rank"] == 9


def test_the_attempt_of_a_job_that_was_deleted_while_it_ran_has_a_colour() -> None:
    made = report(telemetry=None)
    last = replace(made.state.attempts[-1], outcome="running")
    gone = deleted(replace(made.state, phase=Phase.RUNNING, attempts=[last]), now=made.seen)
    chart = charts_of(replace(made, state=gone))[0]
    assert chart.spec["encoding"]["color"]["scale"] == {
        "domain": ["deleted"],
        "range": ["var(--outcome-deleted)"],
    }


def test_the_rows_of_a_large_job_are_bounded() -> None:
    charts = charts_of(report(1000, telemetry=telemetry(1000, 8, HISTORY_LIMIT)))
    assert max(len(chart.spec["data"]["values"]) for chart in charts) <= max(2 * HISTORY_LIMIT, RANKS_LIMIT)
