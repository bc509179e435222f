"""How long each phase of a job may be silent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flk_runtime.contract.options import ALL_PHASES, parse_hang_timeout
from flk_runtime.contract.status import Phase
from flk_runtime.launcher.hangs.phases import LIMITS, PhaseLimits
from tests.unit.flk_runtime.launcher.hangs.test_hangs import QUIET, SLEEPS, WAITS, Leader, waiting


def silent(phase: Phase, *seconds: float) -> PhaseLimits:
    """Limits that have seen two ranks be silent for so long in a phase, each time followed by progress."""
    limits = PhaseLimits({})
    for each in seconds:
        for idle in (each / 2, each, 0.0):
            limits.note([replace(QUIET, idle=idle, phase=phase), replace(WAITS, idle=9000, phase=Phase.TRAINING)])
    return limits


@pytest.mark.parametrize("phase", Phase)
def test_a_silence_below_the_limit_of_its_phase_is_no_hang_and_a_longer_one_is_named(phase: Phase) -> None:
    """A shorter one is a standstill, which people are told."""
    leader, limit = Leader(None), LIMITS[phase].default
    ends = []
    for idle in (limit - 5, limit + 5):
        status = replace(QUIET, idle=idle, cpu_idle=idle, phase=phase)
        leader.heartbeat(replace(WAITS, idle=idle, waits=idle, phase=Phase.TRAINING), status)
        leader.detector.tick(6.0 + idle)
        leader.send_stacks(waiting(0), SLEEPS)
        ends.append(leader.detector.tick(6.5 + idle))
    standstill, failure = ends
    assert standstill is None
    assert leader.waits[0][1] is not None
    assert failure is not None
    assert failure.details.splitlines()[0] == f"limit {limit:g} s in phase {phase}, the default"


def test_a_phase_that_was_silent_for_long_before_it_went_on_gets_a_longer_limit() -> None:
    limits = silent(Phase.SAVING, 1000.0)
    assert limits.describe(Phase.SAVING) == "limit 3000 s in phase save, learned from 1000 s"
    assert limits.limit(Phase.TRAINING) == LIMITS[Phase.TRAINING].default, (
        "ranks that wait for it are not what was silent"
    )


def test_a_phase_that_is_often_short_gets_a_shorter_limit_and_no_less_than_the_table_says() -> None:
    assert silent(Phase.TRAINING, *[30.0] * 99).limit(Phase.TRAINING) == 480
    assert silent(Phase.TRAINING, *[30.0] * 100).limit(Phase.TRAINING) == 300
    assert silent(Phase.TRAINING, *[2.0] * 100).limit(Phase.TRAINING) == LIMITS[Phase.TRAINING].least == 240


def test_a_silence_that_has_not_ended_teaches_nothing() -> None:
    limits = PhaseLimits({})
    for idle in (1000.0, 2000.0, 4000.0):
        limits.note([replace(QUIET, idle=idle, phase=Phase.RESTORING)])
    limits.start()
    limits.note([replace(QUIET, idle=0.0, phase=Phase.STARTING)])
    assert limits.limit(Phase.RESTORING) == LIMITS[Phase.RESTORING].default


def test_the_users_hang_timeout_wins_in_each_phase() -> None:
    limits = PhaseLimits({ALL_PHASES: 60.0})
    limits.note([replace(QUIET, idle=900.0, phase=Phase.EVALUATING)])
    limits.note([replace(QUIET, idle=0.0, phase=Phase.EVALUATING)])
    assert {phase: limits.limit(phase) for phase in Phase if phase != Phase.SAVING} == dict.fromkeys(
        set(Phase) - {Phase.SAVING}, 60.0
    )
    assert limits.limit(Phase.SAVING) == 240.0
    assert PhaseLimits({ALL_PHASES: 0}).off


def test_the_users_limit_of_a_phase_wins_over_that_of_all() -> None:
    limits = PhaseLimits(parse_hang_timeout("1m,save=45s,evaluation=0"))
    assert (limits.limit(Phase.SAVING), limits.limit(Phase.EVALUATING), limits.limit(Phase.TRAINING)) == (
        45.0,
        math.inf,
        60.0,
    )
    assert limits.describe(Phase.SAVING) == "limit 45 s in phase save, from the hang timeout of the phase"
    assert not limits.off
    limits = PhaseLimits(parse_hang_timeout("step=5m"))
    assert (limits.limit(Phase.TRAINING), limits.limit(Phase.SAVING)) == (300.0, LIMITS[Phase.SAVING].default)
    assert not PhaseLimits(parse_hang_timeout("step=0")).off
    assert PhaseLimits(parse_hang_timeout("0,step=1h")).limit(Phase.RESTORING) == math.inf


def test_every_phase_has_a_limit_and_can_be_named() -> None:
    assert list(LIMITS) == list(Phase)
    for phase in Phase:
        assert parse_hang_timeout(f"{phase}=5") == {phase: 5.0}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0.5", {ALL_PHASES: 0.5}),
        ("90", {ALL_PHASES: 90.0}),
        ("1d2h3m4s", {ALL_PHASES: 93784.0}),
        ("step=1h30m", {"step": 5400.0}),
    ],
)
def test_a_hang_timeout_is_read(text: str, seconds: dict[str, float]) -> None:
    assert parse_hang_timeout(text) == seconds


@pytest.mark.parametrize("text", ["", "x", "step=", "step", "=5", "5m,6m", "step=1,step=2", "1s1h", "-1", "1e3", "inf"])
def test_a_wrong_hang_timeout_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_hang_timeout(text)
