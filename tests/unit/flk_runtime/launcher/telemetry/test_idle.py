"""Since when the GPUs of a job do nothing."""

from __future__ import annotations

from flk_runtime.contract.telemetry import GpuUsage, PodUsage
from flk_runtime.launcher.telemetry.idle import IdleGpus


def usage(*busy: float) -> PodUsage:
    return PodUsage(0, "", "", 0.0, gpus=[GpuUsage(each, 0, 1) for each in busy])


def test_all_gpus_of_all_pods_must_do_nothing() -> None:
    idle = IdleGpus()
    idle.start_attempt([0, 2])
    idle.add(0, usage(0.0, 0.04), 10.0)
    assert (idle.since(10.0), idle.unknown(10.0)) == (None, [2])
    idle.add(2, usage(0.0), 20.0)
    idle.add(0, usage(0.01, 0.0), 30.0)
    assert (idle.since(30.0), idle.unknown(30.0)) == (20.0, [])
    idle.add(2, usage(0.0, 0.06), 40.0)
    assert idle.since(40.0) is None
    idle.add(2, usage(0.0, 0.0), 50.0)
    assert idle.since(50.0) == 50.0


def test_a_pod_whose_gpus_are_not_known_any_more_may_be_busy() -> None:
    idle = IdleGpus()
    idle.start_attempt([0])
    idle.add(0, usage(0.0), 10.0)
    idle.add(0, usage(), 20.0)
    assert (idle.since(20.0), idle.unknown(20.0)) == (None, [0])


def test_an_attempt_begins_anew_and_pods_that_take_no_part_do_not_count() -> None:
    idle = IdleGpus()
    idle.start_attempt([0, 1])
    idle.add(0, usage(0.0), 10.0)
    idle.start_attempt([1])
    idle.add(0, usage(0.9), 20.0)
    idle.add(1, usage(0.0), 30.0)
    assert idle.since(30.0) is None


def test_readings_that_have_stopped_say_nothing() -> None:
    """Where the driver hangs, or the thread that reads has ended, GPUs may be busy."""
    idle = IdleGpus()
    idle.start_attempt([0, 1])
    for now in (10.0, 20.0):
        idle.add(0, usage(0.0), now)
        idle.add(1, usage(0.0), now)
    assert idle.since(100.0) == 10.0
    assert (idle.since(141.0), idle.unknown(141.0)) == (None, [0, 1])
    idle.add(0, usage(0.0), 150.0)
    idle.add(1, usage(0.0), 160.0)
    assert idle.since(170.0) == 160.0


def test_a_pod_alone_that_was_not_known_for_a_time_is_idle_since_it_is_known_again() -> None:
    idle = IdleGpus()
    idle.start_attempt([0])
    for now in (10.0, 20.0, 2000.0):
        idle.add(0, usage(0.0), now)
    assert idle.since(2000.0) == 2000.0
