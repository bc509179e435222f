"""Hangs and slow ranks as decisions over data: what counts as progress, who is waited for, who is slow."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import SlowRank, Standstill
from flk_runtime.contract.status import NEVER, RankStatus
from flk_runtime.contract.telemetry import PodStatus
from flk_runtime.launcher.hangs import diagnosis as report
from flk_runtime.launcher.hangs.detector import CPU_PATIENCE, Actions, HangDetector, Stragglers, hangs
from flk_runtime.launcher.hangs.diagnosis import activity, diagnose
from flk_runtime.launcher.hangs.snapshot import Frame, Snapshot, parse_stacks
from flk_runtime.launcher.hangs.watch import Watched
from flk_runtime.shared.observer import Pending

LIMIT = 100.0
QUIET = RankStatus(0, 0, idle=500, beat=NEVER, cpu_idle=500)
WAITS = replace(QUIET, rank=1, waits=500)

STACK = (Frame("train.py", 20, "step", "dist.all_reduce(loss)"), Frame("train.py", 31, "<module>", "step()"))
C10D = Frame("torch/distributed/distributed_c10d.py", 3252, "all_reduce", "work.wait()")
REDUCE = Pending("nccl:0", 812, "all_reduce", "[[10]]")


def waiting(rank: int, pending: Pending = REDUCE, **values: Any) -> Snapshot:
    """A rank that waits in a collective."""
    stack = (C10D, *STACK)
    groups = {pending.group: pending.number}
    return Snapshot(rank, rank, f"gpt-worker-{rank}", "node-a", "S", stack, pending=(pending,), groups=groups, **values)


def elsewhere(rank: int, *stack: Frame, **values: Any) -> Snapshot:
    """A rank that has not reached the collective in which the others wait."""
    return Snapshot(
        rank, rank, f"gpt-worker-{rank}", "node-b", **{"state": "S", "main": stack, "groups": {"nccl:0": 811}, **values}
    )


# The decision ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([], False),
        ([QUIET, WAITS], True),
        ([WAITS, WAITS], True),
        ([replace(QUIET, idle=99), WAITS], False),
        ([replace(QUIET, beat=99, idle=99), WAITS], False),
        ([replace(WAITS, idle=1)], True),
        ([replace(WAITS, cpu_idle=1)], True),
        ([replace(WAITS, idle=1, beat=1), WAITS], False),
        ([replace(QUIET, idle=399, cpu_idle=1), WAITS], False),
        ([replace(QUIET, idle=CPU_PATIENCE * LIMIT + 1, cpu_idle=1), WAITS], True),
        ([replace(QUIET, idle=9000, cpu_idle=1), replace(QUIET, cpu_idle=1)], False),
        ([replace(QUIET, idle=9000, cpu_idle=1), QUIET], False),
    ],
    ids=[
        "no ranks",
        "one is stuck, its peer waits",
        "all wait",
        "one writes lines while its peer waits",
        "one sends heartbeats while its peer waits",
        "a line of another thread while the rank waits",
        "a rank spins while it waits",
        "a step although another collective is pending",
        "one computes for long while its peer waits",
        "one computes for too long while its peer waits",
        "all compile, nobody waits",
        "one computes, nobody waits",
    ],
)
def test_what_counts_as_a_hang(statuses: list[RankStatus], expected: bool) -> None:
    assert hangs(statuses, lambda phase: LIMIT) is expected


def test_only_a_share_of_a_cpu_counts_as_cpu_time() -> None:
    unused: Any = None
    meter = Watched(unused, 0.0, 0.0, (0.0, 0.0))
    meter.update(10.0, 0.4)
    assert meter.busy_time == 0.0
    meter.update(20.0, 1.0)
    assert meter.busy_time == 20.0
    meter.update(30.0, 1.01)
    assert meter.busy_time == 20.0


# The diagnosis ---------------------------------------------------------------------------------------------------


def test_the_rank_that_did_not_reach_a_collective_is_named() -> None:
    ranks = [waiting(0), waiting(1), waiting(2), elsewhere(3, Frame("train.py", 12, "load", "time.sleep(9)"))]
    diagnosis = diagnose(ranks)
    assert diagnosis.sentence() == "rank 3 did not reach all_reduce 812; it is at train.py:12 in load"


def test_a_rank_that_does_not_answer_misses_the_default_group() -> None:
    ranks = [waiting(0), waiting(1), elsewhere(2, state="T", groups={}, answers=False)]
    assert diagnose(ranks).sentence() == "rank 2 did not reach all_reduce 812; it is stopped (SIGSTOP)"


def test_a_rank_outside_of_a_group_is_not_missing_in_it() -> None:
    inner = Pending("nccl:2", 5, "all_gather")
    outer = {"nccl:0": 9}
    ranks = [waiting(0, inner), elsewhere(1, STACK[0], groups={**outer, "nccl:2": 4}), elsewhere(2, groups=outer)]
    told = diagnose(ranks).sentence()
    assert told.startswith("rank 1 did not reach all_gather 5 of group nccl:2; it is at train.py:20")


def test_a_rank_that_is_ahead_in_gloos_part_of_the_default_group_is_missing_in_nccls() -> None:
    ranks = [waiting(0), waiting(1), elsewhere(2, STACK[0], groups={"gloo:0": 900, "nccl:0": 811})]
    assert diagnose(ranks).sentence().startswith("rank 2 did not reach all_reduce 812")
    ranks[2] = elsewhere(2, STACK[0], groups={"gloo:0": 900})
    assert diagnose(ranks).sentence().startswith("rank 2 did not reach all_reduce 812")


def test_different_collectives_are_told_apart() -> None:
    ranks = [waiting(0), waiting(1, replace(REDUCE, name="broadcast")), waiting(2)]
    assert diagnose(ranks).sentence() == "rank 1 is in broadcast 812, the others in all_reduce 812"
    ranks += [waiting(3), waiting(4, replace(REDUCE, name="all_gather"))]
    assert diagnose(ranks).ranks == (1,)  # the ranks at the place that is named


def test_all_ranks_in_the_same_collective() -> None:
    ranks = [waiting(0), waiting(1)]
    assert diagnose(ranks).sentence() == "ranks 0-1 are in all_reduce 812"
    ranks[1] = waiting(1, replace(REDUCE, sizes="[[20]]"))
    assert diagnose([*ranks, waiting(2)]).sentence() == (
        "rank 1 is in all_reduce 812 with sizes [[20]], the others in all_reduce 812 with sizes [[10]]"
    )


def test_ranks_of_a_job_that_runs_are_in_a_collective_that_others_have_left() -> None:
    ranks = [waiting(0), waiting(1), elsewhere(2, STACK[0], groups={"nccl:0": 812})]
    assert diagnose(ranks).sentence() == "ranks 0-1 are in all_reduce 812"


def test_stacks_tell_without_a_flight_recorder() -> None:
    inside = Snapshot(0, 0, main=(C10D, *STACK))
    outside = Snapshot(1, 1, main=(Frame("train.py", 9, "<module>"),))
    assert diagnose([inside, replace(inside, rank=2), outside]).sentence() == (
        "rank 1 did not reach all_reduce; it is at train.py:9"
    )
    other = replace(inside, rank=1, main=(C10D._replace(function="broadcast"), *STACK))
    assert diagnose([inside, replace(inside, rank=2), other]).sentence() == (
        "rank 1 is in broadcast, the others in all_reduce"
    )


def test_ranks_before_their_first_group_meet_in_flk_init() -> None:
    meets = Frame("flk_runtime/preflight/exchange.py", 88, "hub")
    ranks = [elsewhere(0, STACK[1]), Snapshot(1, 1, main=(meets, Frame("train.py", 3, "<module>")))]
    assert diagnose(ranks).sentence() == "rank 0 did not reach flk_runtime.init; it is at train.py:31"


def test_ranks_that_wait_for_nobody_are_told_by_what_they_do() -> None:
    same = [elsewhere(0, STACK[1]), elsewhere(1, STACK[1])]
    assert diagnose(same).sentence() == "ranks 0-1 do the same: each is at train.py:31"
    differ = [elsewhere(0, STACK[1]), elsewhere(1, IMPORT, STACK[0])]
    assert diagnose(differ).sentence() == "ranks 0-1 are at different places"
    alike = [elsewhere(0, STACK[1]), elsewhere(1, Frame("flk_diloco/rounds.py", 5, "wait"), STACK[1])]
    assert diagnose(alike).sentence() == "ranks 0-1 do the same: each is at train.py:31"


LOADER = Frame("torch/utils/data/dataloader.py", 1291, "_try_get_data")
IMPORT = Frame("<frozen importlib._bootstrap>", 1176, "_find_and_load")
JOIN = Frame("python3.11/threading.py", 1, "join")


@pytest.mark.parametrize(
    ("snapshot", "expected"),
    [
        (elsewhere(0, LOADER, STACK[0]), "waits in its DataLoader at train.py:20 in step"),
        (
            elsewhere(0, LOADER, STACK[0], workers=((Frame("data.py", 7, "__getitem__"),),)),
            "waits in its DataLoader for a worker process at train.py:20 in step; the worker is at data.py:7 in "
            "__getitem__",
        ),
        (elsewhere(0, IMPORT, STACK[0]), "imports a module at train.py:20 in step"),
        (elsewhere(0, state="D"), "waits for a disk or a device"),
        (
            elsewhere(0, STACK[0], answers=False),
            "is at train.py:20 in step, in native code that holds Python's lock (GIL)",
        ),
        (elsewhere(0, JOIN, STACK[0]), "waits for another thread at train.py:20 in step"),
        (elsewhere(0), "shows no Python stack"),
    ],
)  # fmt: skip
def test_what_a_rank_does(snapshot: Snapshot, expected: str) -> None:
    assert activity(snapshot) == expected


def test_a_report_of_a_thousand_ranks_is_short_and_shows_the_odd_one_first() -> None:
    ranks = [waiting(rank) for rank in range(1000)]
    ranks[371] = elsewhere(371, Frame("train.py", 12, "load", "time.sleep(9)"))
    diagnosis = diagnose(ranks)
    lines = report.lines_of(report.to_dict(ranks, diagnosis, []))
    assert lines[:2] == [
        "rank 371 in gpt-worker-371 on node-b: is at train.py:12 in load",
        "  train.py:12 in load: time.sleep(9)",
    ]
    assert lines[2] == "ranks 0-370, 372-999: each is in all_reduce 812 at train.py:20 in step"
    assert len(lines) < 20


def test_a_report_of_ranks_that_all_differ_is_bounded() -> None:
    ranks = [elsewhere(rank, Frame("train.py", rank, "f")) for rank in range(1000)]
    lines = report.lines_of(report.to_dict(ranks, diagnose(ranks), []))
    assert len(lines) < 100
    assert lines[-1].startswith("other stacks of ranks ")


def test_stacks_of_faulthandler_are_read() -> None:
    text = """Thread 0x00007f (most recent call first):
  File "/gone/lib/python3.11/socket.py", line 294 in accept
  File "/opt/flk_runtime/shared/observer.py", line 90 in _serve

Thread 0x00007e (most recent call first):
  File "/gone/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007d (most recent call first):
  File "/usr/lib/site-packages/torch/nn/module.py", line ??? in forward
  File "/code/train.py", line 4 in <module>
  File "/opt/flk_runtime/launcher/processes/rank_process.py", line 110 in _run
  File "/opt/flk_runtime/launcher/processes/forkserver.py", line 200 in _become_rank
"""
    assert parse_stacks(text, "/code") == [
        (Frame("python3.11/threading.py", 327, "wait"),),
        (Frame("torch/nn/module.py", 0, "forward"), Frame("train.py", 4, "<module>")),
    ]


# Slow ranks ------------------------------------------------------------------------------------------------------


def slow(*looks: tuple[int, ...]) -> dict[int, float]:
    """The slow ranks after looks, one every 30 seconds: the number of samples, and of those that each rank waits in."""
    stragglers = Stragglers(60)
    for index, (samples, *pending) in enumerate(looks):
        ranks = [replace(QUIET, rank=rank, samples=samples, pending=count) for rank, count in enumerate(pending)]
        stragglers.update(30.0 * index, ranks)
    return stragglers.slow


def test_a_rank_that_works_longer_than_the_median_is_slow() -> None:
    assert slow((0, 0, 0, 0, 0), (300, 150, 150, 105, 150)) == {}
    assert slow((0, 0, 0, 0, 0), (300, 150, 150, 105, 150), (600, 300, 300, 210, 300)) == {2: 1.3}


@pytest.mark.parametrize(
    ("samples", "pending"),
    [
        (600, (600, 600, 600)),
        (600, (0, 0, 0)),
        (600, (300, 300, 250)),
        (6000, (700, 700, 0)),
        (6000, (5940, 5940, 5520)),
        (150, (75, 75, 52)),
        (10, (10, 10, 0)),
    ],
    ids=[
        "all equal",
        "nobody waits",
        "a small difference",
        "a small part of the work",
        "all only wait",
        "perhaps by chance",
        "hardly looked at",
    ],
)
def test_ranks_that_differ_little_are_not_slow(samples: int, pending: tuple[int, ...]) -> None:
    assert slow((0, 0, 0, 0), (samples // 2, 0, 0, 0), (samples, *pending)) == {}


def test_a_rank_stays_slow_until_it_clearly_is_not() -> None:
    begun = ((0, 0, 0, 0), (300, 150, 150, 105), (600, 300, 300, 210))
    assert slow(*begun, (900, 450, 450, 360), (1200, 600, 600, 462)) == {2: 1.2}
    assert slow(*begun, (900, 450, 450, 360), (1200, 600, 600, 510)) == {}


def test_ranks_are_compared_over_many_steps_which_may_differ_in_length() -> None:
    looks = ((0, 0, 0, 0), (300, 150, 150, 0), (600, 300, 300, 0), (1500, 750, 750, 0), (3000, 1500, 1500, 0))
    stragglers = Stragglers(60)
    for samples, *pending in looks:
        ranks = [
            replace(QUIET, rank=rank, samples=samples, pending=count, step_seconds=5.0)
            for rank, count in enumerate(pending)
        ]
        stragglers.update(samples / 10, ranks)
        assert bool(stragglers.slow) == (samples == 3000)


def test_with_other_ranks_than_before_nobody_is_slow() -> None:
    assert slow((0, 0, 0), (300, 150, 150, 0), (600, 300, 300, 0)) == {}


# The leader's side -----------------------------------------------------------------------------------------------


class Leader:
    """A detector of two pods with one rank each, and what it says."""

    def __init__(self, limit: float | None = LIMIT) -> None:
        self.requests: list[tuple[int, int]] = []
        self.answers: list[tuple[tuple[int, str], dict[str, Any]]] = []
        self.waits: list[tuple[list[SlowRank], Standstill | None]] = []
        self.log: list[str] = []
        self.detector = HangDetector(
            limit,
            Stragglers(60),
            Actions(
                lambda pod, number: self.requests.append((pod, number)),
                lambda asker, answer: self.answers.append((asker, answer)),
                lambda *waits: self.waits.append(waits),
                self.log.append,
                lambda *_: None,
            ),
        )
        self.detector.attempt_started(4, {0: ("gpt-worker-0", "node-a"), 1: ("gpt-worker-1", "node-b")}, 0.0)

    def heartbeat(self, *statuses: RankStatus, attempt: int = 4) -> None:
        for pod, status in enumerate(statuses):
            self.detector.heartbeat(pod, PodStatus(attempt, [replace(status, rank=pod, pod=pod)]))

    def send_stacks(self, *snapshots: Snapshot) -> None:
        for (pod, number), snapshot in zip(self.requests[-len(snapshots) :], snapshots, strict=True):
            self.detector.received_stacks(pod, number, [snapshot])


def alarmed() -> Leader:
    """A leader that has asked for the stacks of a job which hangs."""
    leader = Leader()
    leader.heartbeat(WAITS, QUIET)
    assert leader.detector.tick(6.0) is None
    return leader


SLEEPS = elsewhere(1, Frame("train.py", 12, "load"))


def test_a_hang_ends_the_attempt_with_the_stacks_of_all_pods() -> None:
    leader = alarmed()
    assert leader.requests == [(0, 1), (1, 1)]
    leader.send_stacks(waiting(0), SLEEPS)
    failure = leader.detector.tick(6.5)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.rank, failure.pod, failure.node, failure.attempt) == ("hang", 1, 1, "node-b", 4)
    assert failure.code is ExitCode.INFRASTRUCTURE
    assert failure.summary == "rank 1 in gpt-worker-1 did not reach all_reduce 812; it is at train.py:12 in load"
    assert "train.py:12 in load" in failure.details
    limit = "limit 100 s in phase start"
    assert failure.details.splitlines()[0] == limit
    assert leader.log[0].startswith(f"no rank has made progress for 500 s ({limit}): rank 1 did not reach all_reduce")


def test_a_pod_that_sends_no_stacks_does_not_hold_up_the_report() -> None:
    leader = alarmed()
    leader.detector.received_stacks(0, 1, [waiting(0)])
    assert leader.detector.tick(17.0) is None
    failure = leader.detector.tick(18.0)
    assert failure is not None
    assert leader.log[-1] == "no stacks from gpt-worker-1"


def test_a_hang_of_which_no_pod_sends_stacks_is_ended_too() -> None:
    leader = alarmed()
    failure = leader.detector.tick(18.0)
    assert failure
    assert (failure.kind, failure.pod_name) == ("hang", "gpt-worker-0")
    assert failure.message == "do the same: each shows no Python stack"
    assert leader.log[-1] == "no stacks from gpt-worker-0, gpt-worker-1"


@pytest.mark.parametrize("progress", [{"idle": 1.0, "beat": 1.0}, {"idle": 2.0}])
def test_progress_while_stacks_are_gathered_ends_the_alarm(progress: dict[str, float]) -> None:
    leader = alarmed()
    leader.heartbeat(WAITS, replace(QUIET, **progress))
    leader.send_stacks(waiting(0), SLEEPS)
    assert leader.detector.tick(6.5) is None
    assert leader.log == []


def test_a_pod_that_has_said_nothing_yet_or_speaks_of_another_attempt_is_waited_for() -> None:
    leader = Leader()
    leader.heartbeat(WAITS)
    assert leader.detector.tick(6.0) is None
    leader.heartbeat(WAITS, QUIET, attempt=3)
    assert leader.detector.tick(600.0) is None
    assert leader.requests == []


INIT = Frame("torch/distributed/distributed_c10d.py", 1700, "init_process_group", "store = next(rendezvous)")
IN_INIT = Snapshot(1, 1, "gpt-worker-1", "node-b", main=(INIT, Frame("train.py", 3, "<module>")))
ASLEEP = Snapshot(0, 0, "gpt-worker-0", "node-a", main=(Frame("train.py", 2, "<module>", "time.sleep(3600)"),))
QUIET_START = replace(QUIET, idle=31, cpu_idle=31)


@pytest.mark.parametrize("limit", [0.0, LIMIT])
def test_a_standstill_is_told_and_ends_nothing(limit: float) -> None:
    leader = Leader(limit)
    leader.heartbeat(QUIET_START, QUIET_START)
    assert leader.detector.tick(36.0) is None
    leader.send_stacks(ASLEEP, IN_INIT)
    assert leader.detector.tick(36.5) is None
    ((slow, standstill),) = leader.waits
    assert standstill is not None
    assert (slow, standstill.pod_name) == ([], "gpt-worker-0")
    assert standstill.text == "rank 0 did not reach init_process_group; it is at train.py:2"
    assert leader.log == [f"no rank makes progress: {standstill.text}"]
    leader.detector.tick(60.0)
    assert len(leader.requests) == 2, "it is looked at again only after a minute"
    leader.heartbeat(replace(QUIET_START, idle=1), QUIET_START)
    leader.detector.tick(66.0)
    assert leader.waits[1:] == [([], None)]


@pytest.mark.parametrize("silent", [False, True], ids=["all pods answer", "a pod does not answer"])
def test_a_standstill_from_the_start_is_told_within_a_minute(silent: bool) -> None:
    """Of a plain script: rank 0 sleeps at once, and rank 1 imports torch for six seconds before it waits for rank 0."""
    leader, now = Leader(limit=None), 0.0
    while not leader.waits and now < 100:
        now += 1.0
        importing = min(now, 6.0)
        leader.heartbeat(replace(QUIET, idle=now, cpu_idle=now), replace(QUIET, idle=now, cpu_idle=now - importing))
        before = len(leader.requests)
        leader.detector.tick(now)
        if len(leader.requests) > before:
            leader.detector.received_stacks(0, leader.requests[before][1], [ASLEEP])
            if not silent:
                leader.detector.received_stacks(1, leader.requests[before][1], [IN_INIT])
    ((_, standstill),) = leader.waits
    assert standstill is not None
    assert "rank 0" in standstill.text
    assert time.time() - standstill.since == pytest.approx(now, abs=5), "it began with the attempt"
    assert now < 60


def test_a_standstill_that_lasts_is_looked_at_again_and_told_when_it_differs() -> None:
    leader = Leader(limit=0)
    for now, ranks in ((36.0, (ASLEEP, IN_INIT)), (97.0, (ASLEEP, IN_INIT)), (158.0, (waiting(0), SLEEPS))):
        leader.heartbeat(QUIET_START, QUIET_START)
        leader.detector.tick(now)
        leader.send_stacks(*ranks)
        leader.detector.tick(now + 0.5)
    told = [standstill.text[:20] for _, standstill in leader.waits if standstill]
    assert told == ["rank 0 did not reach", "rank 1 did not reach"]


def test_stacks_that_somebody_wants_are_sent_although_the_attempt_ends() -> None:
    leader = alarmed()
    leader.detector.want_stacks((0, "cli"), 6.1)
    leader.detector.attempt_ended()
    leader.send_stacks(waiting(0), SLEEPS)
    leader.detector.tick(6.5)
    assert [asker for asker, _ in leader.answers] == [(0, "cli")]


def test_stacks_on_demand_leave_the_attempt_alone() -> None:
    leader = Leader()
    leader.heartbeat(replace(QUIET, idle=1), replace(QUIET, idle=1))
    leader.detector.want_stacks((0, "cli"), 1.0)
    leader.detector.want_stacks((1, "other"), 1.1)
    leader.send_stacks(waiting(0), SLEEPS)
    assert leader.detector.tick(1.2) is None
    assert [asker for asker, _ in leader.answers] == [(0, "cli"), (1, "other")]
    assert leader.answers[0][1]["cause"] == "rank 1 did not reach all_reduce 812; it is at train.py:12 in load"
    assert [group["ranks"] for group in leader.answers[0][1]["groups"]] == [[1], [0]]
    assert leader.log == []


def test_stacks_between_two_attempts_are_an_empty_report() -> None:
    leader = Leader()
    leader.detector.attempt_ended()
    leader.detector.want_stacks((0, "cli"), 1.0)
    leader.detector.tick(1.0)
    assert leader.answers[0][1]["groups"] == []


def test_slow_ranks_are_told_once_and_when_they_change() -> None:
    leader = Leader()
    for seconds in range(0, 301, 5):
        samples = seconds * 5
        leader.heartbeat(
            replace(QUIET, idle=0, samples=samples, pending=samples // 2, data_wait=0.1),
            replace(
                QUIET, idle=0, samples=samples, data_wait=0.19 if seconds < 200 else 0.21 if seconds < 250 else 0.1
            ),
        )
        leader.detector.tick(seconds + 6.0)
    rank = SlowRank(1, "gpt-worker-1", "node-b", 2.0)
    assert leader.waits == [([rank], None), ([replace(rank, data_wait=0.21)], None)]
    assert leader.log == [
        "rank 1 in gpt-worker-1 on node-b is slow: it works 2 times as long as the others",
        "rank 1 in gpt-worker-1 on node-b is slow: it works 2 times as long as the others, "
        "and waits for its data 21% of the time",
    ]


def test_a_rank_that_is_slow_already_is_not_told_again_with_the_next_one() -> None:
    leader = Leader()
    leader.detector.attempt_started(4, {pod: (f"gpt-worker-{pod}", "") for pod in range(4)}, 0.0)
    for seconds in range(0, 301, 5):
        half = seconds * 5 // 2
        counts = half, half, 0, min(half, 300)
        leader.heartbeat(*(replace(QUIET, idle=0, samples=seconds * 5, pending=count) for count in counts))
        leader.detector.tick(seconds + 6.0)
    assert [line.split()[1] for line in leader.log] == ["2", "3"]
