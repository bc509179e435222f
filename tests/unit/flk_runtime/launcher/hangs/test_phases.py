"""How long each phase of a job may be silent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flk_runtime.contract.options import ALL_PHASES, parse_hang_timeout
from flk_runtime.contract.status import Phase
from flk_runtime.launcher.hangs.detector import LIMITS, PhaseLimits
from tests.unit.flk_runtime.launcher.hangs.test_hangs import QUIET, SLEEPS, WAITS, Leader, waiting


@pytest.mark.parametrize("phase", Phase)
def test_a_silence_below_the_limit_of_its_phase_is_no_hang_and_a_longer_one_is_named(phase: Phase) -> None:
    """A shorter one is a standstill, which people are told."""
    leader, limit = Leader(None), LIMITS[phase]
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
    assert failure.details.splitlines()[0] == f"limit {limit:g} s in phase {phase}"


def test_the_users_hang_timeout_wins_in_each_phase() -> None:
    limits = PhaseLimits({ALL_PHASES: 60.0})
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
    assert not limits.off
    limits = PhaseLimits(parse_hang_timeout("step=5m"))
    assert (limits.limit(Phase.TRAINING), limits.limit(Phase.SAVING)) == (300.0, LIMITS[Phase.SAVING])
    assert not PhaseLimits(parse_hang_timeout("step=0")).off
    assert PhaseLimits(parse_hang_timeout("0,step=1h")).limit(Phase.RESTORING) == math.inf


def test_every_phase_has_a_limit_and_can_be_named() -> None:
    assert list(LIMITS) == list(Phase)
    for phase in Phase:
        assert parse_hang_timeout(f"{phase}=5") == {phase: 5.0}


@pytest.mark.parametrize("text", ["step=", "step", "=5", "5m,6m", "step=1,step=2", "1e3", "inf"])
def test_a_hang_timeout_that_names_a_phase_wrongly_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must "):
        parse_hang_timeout(text)
