"""The measurements of a job in the launcher of pod 0."""

from __future__ import annotations

import itertools
import json
import time

import pytest

from flk_runtime.contract.status import Phase, RankStatus
from flk_runtime.contract.telemetry import (
    PODS_LIMIT,
    RANKS_LIMIT,
    PodStatus,
    PodUsage,
    Sample,
    Telemetry,
)
from flk_runtime.launcher.telemetry.keeper import History, Keeper
from flk_runtime.training.lines import json_line as line

MIB = 1 << 20


def status(rank: int, step: int = 4, seconds: float = 0.5) -> RankStatus:
    return RankStatus(rank, rank // 2, step, Phase.TRAINING, seconds, memory=100 * MIB)


def keeper(pods: int = 2) -> Keeper:
    made = Keeper({"strategy": "ddp"})
    made.start_attempt(0, range(pods))
    return made


def test_lines_of_metrics_become_samples_with_the_steps_of_all_ranks() -> None:
    made = keeper()
    for pod, ranks in (0, []), (1, [status(2), status(3, seconds=0.7)]):
        usage = PodUsage(pod, f"job-{pod}", "", 1.0, memory=70 * MIB - pod)
        made.heartbeat(pod, PodStatus(0, ranks, usage))
    made.compare({2: 0.2, 3: 0.9}, {})
    made.add_line(b"no metrics")
    made.add_line(b'{"step": 5, "loss": 1.5, "max_steps": 90, "mfu": NaN}')
    found = made.read()
    assert found.total_steps == 90
    (sample,) = found.history
    assert (sample.step, sample.loss, sample.mfu, sample.step_seconds) == (5, 1.5, None, 0.5)
    assert (sample.slowest_rank, sample.slowest_seconds, sample.memory) == (3, 0.63, 70 * MIB)


def test_the_worst_ranks_and_their_pods_come_first() -> None:
    made = keeper()
    for pod in (0, 1):
        usage = PodUsage(pod, f"job-{pod}", f"node-{pod}", 1.0, cpu=0.5)
        made.heartbeat(pod, PodStatus(0, [status(2 * pod), status(2 * pod + 1)], usage))
    made.compare({0: 0.3, 1: 0.3, 2: 0.9, 3: 0.4}, {2: 3.0})
    found = made.read()
    assert [rank.rank for rank in found.ranks] == [2, 3, 0, 1]
    assert (found.ranks[0].slow, found.ranks[0].work, found.ranks[0].memory) == (3.0, 0.9, 100 * MIB)
    assert [(pod.pod, pod.pod_name, pod.node) for pod in found.pods] == [(1, "job-1", "node-1"), (0, "job-0", "node-0")]


def test_a_script_without_metrics_has_samples_of_its_steps() -> None:
    made = keeper()
    made.heartbeat(0, PodStatus(0, [status(0, step=-1)]))
    assert made.read().history == []
    made.heartbeat(0, PodStatus(0, [status(0, step=4)]))
    made.heartbeat(0, PodStatus(0, [status(0, step=4)]))
    assert [(each.step, each.step_seconds) for each in made.read().history] == [(4, 0.5)]


def test_a_status_soon_after_a_line_of_metrics_becomes_no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    made, passed = keeper(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: passed)
    made.heartbeat(0, PodStatus(0, [status(0, step=4)]))
    passed += 9
    made.add_line(b'{"step": 5, "loss": 1.0}')
    passed += 2
    made.heartbeat(0, PodStatus(0, [status(0, step=6)]))
    assert [each.step for each in made.read().history] == [4, 5]


def test_it_goes_on_over_attempts_and_restarts_of_the_launcher() -> None:
    made = keeper()
    made.resume(Telemetry(1.0, 2, 70, [Sample(step, 2, step, loss=1.0) for step in range(5)]))
    made.start_attempt(3, [0])
    made.add_line(b'{"step": 3, "loss": 2.0}')
    found = made.read()
    assert (found.attempt, found.total_steps) == (3, 70)
    assert [(each.attempt, each.step, each.loss) for each in found.history] == [
        (2, 0, 1),
        (2, 1, 1),
        (2, 2, 1),
        (3, 3, 2),
    ]


def test_it_tells_since_when_the_loss_is_no_number() -> None:
    made = keeper()
    made.add_line(b'{"step": 0, "loss": 1.0}')
    made.add_line(line({"step": 1, "loss": float("nan")}).encode())
    made.add_line(b'{"step": 2, "loss": -Infinity}')
    found = made.read()
    assert (found.diverged, [each.loss for each in found.history]) == (1, [1.0, None, None])
    after = keeper()
    after.resume(found)
    assert after.read().diverged == 1
    after.add_line(b'{"step": 1, "loss": 0.5}')
    assert after.read().diverged is None


def test_a_status_of_a_former_attempt_counts_for_nothing() -> None:
    made = keeper()
    made.start_attempt(1, [0])
    made.heartbeat(0, PodStatus(0, [status(0)]))
    assert made.read().ranks == []


def test_the_lists_of_a_large_job_are_bounded_and_are_json() -> None:
    made = keeper(1000)
    for pod in range(1000):
        made.heartbeat(pod, PodStatus(0, [status(8 * pod + each) for each in range(8)], PodUsage(pod, "", "", 1.0)))
    found = made.read()
    assert (len(found.ranks), len(found.pods)) == (RANKS_LIMIT, PODS_LIMIT)
    json.dumps([vars(each) for each in found.history], allow_nan=False)


# The history ----------------------------------------------------------------------------------------------------


def test_a_long_history_is_thinned_evenly_and_keeps_the_latest_sample() -> None:
    history = History(limit=10)
    for step in range(1, 1001):
        history.add(Sample(float(step), 0, step, loss=float(step)))
    found = history.samples()
    assert 5 <= len(found) <= 11
    assert found[-1] == Sample(1000.0, 0, 1000, loss=1000.0)
    steps = [sample.step for sample in found]
    assert steps == sorted(steps)
    assert len({after - before for before, after in itertools.pairwise(steps[:-1])}) == 1


def test_steps_that_are_done_again_replace_the_former_ones() -> None:
    history = History(samples=[Sample(step, 0, step, loss=1.0) for step in range(6)])
    history.add(Sample(10, 1, 3, loss=2.0))
    assert [(each.step, each.loss) for each in history.samples()] == [(0, 1), (1, 1), (2, 1), (3, 2)]


def test_two_lines_of_a_step_become_one_sample() -> None:
    history = History(samples=[Sample(1, 0, 5, loss=1.0), Sample(2, 0, 5, mfu=0.5)])
    assert history.samples() == [Sample(2, 0, 5, loss=1.0, mfu=0.5)]
