"""The numbers that a report begins with."""

from __future__ import annotations

from dataclasses import replace

from flk.report.facts import facts_of
from flk_runtime.contract.record import Goodput
from tests.support.jobs import NOW, JobBuilder
from tests.support.reports import report, telemetry


def test_the_numbers_of_a_job() -> None:
    facts = facts_of(report())
    assert facts["Size"] == "4 pods × 8 ranks"
    assert facts["Steps"] == "1,990 of 20,000"
    assert facts["Goodput"] == "76%"
    assert facts["Restarts"] == "1 of 3"
    assert facts["Newest checkpoint"] == "step 1,980"
    assert facts["Throughput"].endswith(" tokens/s")


def test_the_time_of_a_step_is_the_median_of_an_even_number_too() -> None:
    found = telemetry()
    history = [replace(each, step_seconds=seconds) for each, seconds in zip(found.history, (1.0, 3.0), strict=False)]
    assert facts_of(report(telemetry=replace(found, history=history)))["Step"] == "2 s"


def test_steps_of_a_failed_job_are_those_that_it_did_though_none_was_stored() -> None:
    made = report()
    none = Goodput(NOW, {"lost": 6900.0}, 0, 0)
    assert facts_of(replace(made, state=replace(made.state, goodput=none)))["Steps"] == "1,990 of 20,000"


def test_what_is_not_known_is_empty() -> None:
    facts = facts_of(report(telemetry=None, state=JobBuilder().state()))
    assert {name for name, value in facts.items() if value} == {"Size"}


def test_a_loss_that_is_no_number_is_said() -> None:
    found = report(telemetry=replace(telemetry(), diverged=1200))
    assert facts_of(found)["Last loss"] == "infinite or no number since step 1,200"
