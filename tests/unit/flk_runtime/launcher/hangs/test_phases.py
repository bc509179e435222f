"""How long each phase of a job may be silent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from flk_runtime.contract.status import Phase
from flk_runtime.launcher.hangs.detector import LIMITS, limit_of
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
    assert {limit_of(phase, 60.0) for phase in Phase if phase != Phase.SAVING} == {60.0}
    assert limit_of(Phase.SAVING, 60.0) == 240.0
    assert {limit_of(phase, 0) for phase in Phase} == {math.inf}
