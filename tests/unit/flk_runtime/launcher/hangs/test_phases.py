"""How long each phase of a job may be silent."""

from __future__ import annotations

import math

import pytest

from flk_runtime.contract.hang_timeout import ALL, HANG_PHASES, parse_hang_timeout
from flk_runtime.launcher.hangs.phases import PHASES, PhaseLimits, phase_of
from flk_runtime.shared.progress import Phase, ProgressPage
from tests.unit.flk_runtime.launcher.hangs.test_hangs import QUIET, SLEEPS, WAITS, Leader, waiting


def silent(phase: str, *seconds: float) -> PhaseLimits:
    """Limits that have seen two ranks be silent for so long in a phase, each time followed by progress."""
    limits = PhaseLimits({})
    for each in seconds:
        for idle in (each / 2, each, 0.0):
            limits.note([QUIET._replace(idle=idle, phase=phase), WAITS._replace(idle=9000, phase="step")])
    return limits


@pytest.mark.parametrize(
    ("phase", "step", "collective", "expected"),
    [
        (Phase.STARTING, False, False, "start"),
        (Phase.STARTING, False, True, "step"),
        (Phase.RENDEZVOUS, False, True, "start"),
        (Phase.TRAINING, False, True, "first-step"),
        (Phase.TRAINING, True, True, "step"),
        (Phase.EVALUATING, True, True, "evaluation"),
        (Phase.SAVING, True, True, "save"),
        (Phase.RESTORING, False, True, "restore"),
        (Phase.MEETING, True, True, "round"),
    ],
)
def test_the_phase_of_a_rank(phase: Phase, step: bool, collective: bool, expected: str) -> None:
    page = ProgressPage.private()
    page.phase, page.collective_time = phase, float(collective)
    page.step_time = float(step)
    assert phase_of(page) == expected
    assert expected in PHASES


def test_a_script_that_leaves_an_evaluation_before_its_end_makes_steps() -> None:
    page = ProgressPage.private()
    page.phase = Phase.EVALUATING
    page.record_step(3)
    assert phase_of(page) == "step"


@pytest.mark.parametrize("phase", PHASES)
def test_a_silence_below_the_limit_of_its_phase_is_no_hang_and_a_longer_one_is_named(phase: str) -> None:
    """A shorter one is a standstill, which people are told."""
    leader, limit = Leader(None), PHASES[phase].default
    ends = []
    for idle in (limit - 5, limit + 5):
        status = QUIET._replace(idle=idle, cpu_idle=idle, phase=phase)
        leader.heartbeat(WAITS._replace(idle=idle, waits=idle, phase="step"), status)
        leader.detector.tick(6.0 + idle)
        leader.send_stacks(waiting(0), SLEEPS)
        ends.append(leader.detector.tick(6.5 + idle))
    standstill, failure = ends
    assert standstill is None
    assert leader.waits[0][1] is not None
    assert failure is not None
    assert failure.details.splitlines()[0] == f"limit {limit:g} s in phase {phase}, the default"


def test_a_phase_that_was_silent_for_long_before_it_went_on_gets_a_longer_limit() -> None:
    limits = silent("save", 1000.0)
    assert limits.describe("save") == "limit 3000 s in phase save, learned from 1000 s"
    assert limits.limit("step") == PHASES["step"].default, "ranks that wait for it are not what was silent"


def test_a_phase_that_is_often_short_gets_a_shorter_limit_and_no_less_than_the_table_says() -> None:
    assert silent("step", *[30.0] * 99).limit("step") == 480
    assert silent("step", *[30.0] * 100).limit("step") == 300
    assert silent("step", *[2.0] * 100).limit("step") == PHASES["step"].least == 240


def test_a_later_leader_goes_on_with_what_was_learned() -> None:
    later = PhaseLimits({})
    later.resume(silent("save", 1000.0).silences | silent("step", *[30.0] * 99).silences)
    assert (later.limit("save"), later.limit("step")) == (3000, 480)
    for idle in (20.0, 0.0):
        later.note([QUIET._replace(idle=idle, phase="step")])
    assert later.describe("step") == "limit 300 s in phase step, learned from 30 s"


def test_a_silence_that_has_not_ended_teaches_nothing() -> None:
    limits = PhaseLimits({})
    for idle in (1000.0, 2000.0, 4000.0):
        limits.note([QUIET._replace(idle=idle, phase="restore")])
    limits.start()
    limits.note([QUIET._replace(idle=0.0, phase="start")])
    assert limits.limit("restore") == PHASES["restore"].default


def test_the_users_hang_timeout_wins_in_each_phase() -> None:
    limits = PhaseLimits({ALL: 60.0})
    limits.note([QUIET._replace(idle=900.0, phase="evaluation")])
    limits.note([QUIET._replace(idle=0.0, phase="evaluation")])
    assert {phase: limits.limit(phase) for phase in PHASES if phase != "save"} == dict.fromkeys(
        PHASES.keys() - {"save"}, 60.0
    )
    assert limits.limit("save") == 240.0
    assert PhaseLimits({ALL: 0}).off


def test_the_users_limit_of_a_phase_wins_over_that_of_all() -> None:
    limits = PhaseLimits(parse_hang_timeout("1m,save=45s,evaluation=0"))
    assert (limits.limit("save"), limits.limit("evaluation"), limits.limit("step")) == (45.0, math.inf, 60.0)
    assert limits.describe("save") == "limit 45 s in phase save, from the hang timeout of the phase"
    assert not limits.off
    limits = PhaseLimits(parse_hang_timeout("step=5m"))
    assert (limits.limit("step"), limits.limit("save")) == (300.0, PHASES["save"].default)
    assert not PhaseLimits(parse_hang_timeout("step=0")).off
    assert PhaseLimits(parse_hang_timeout("0,step=1h")).limit("restore") == math.inf


def test_every_phase_can_be_named() -> None:
    assert tuple(PHASES) == HANG_PHASES


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0.5", {ALL: 0.5}), ("90", {ALL: 90.0}), ("1d2h3m4s", {ALL: 93784.0}), ("step=1h30m", {"step": 5400.0})],
)
def test_a_hang_timeout_is_read(text: str, seconds: dict[str, float]) -> None:
    assert parse_hang_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "step=", "step", "=5", "5m,6m", "step=1,step=2", "1s1h", "-1", "1e3", "inf"])
def test_a_wrong_hang_timeout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_hang_timeout(text)
