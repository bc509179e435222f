"""Launchers that have to stop, as the leader decides: who gives which shards to whom, and when an attempt starts."""

from __future__ import annotations

import pytest

from flk_runtime.launcher.coordinator import memory
from flk_runtime.launcher.replication import Inventory, MemoryPlan
from flk_runtime.launcher.replication.plan import CheckpointId, ShardId
from flk_runtime.launcher.transport.messages import (
    MESSAGES,
    AttemptStarted,
    DrainRequest,
    Join,
    Release,
    Transfer,
    Transferred,
)
from tests.unit.flk_runtime.launcher.coordinator.test_leader import Job
from tests.unit.flk_runtime.launcher.coordinator.test_membership import save_and_end, stop

CHECKPOINT = CheckpointId("first", 7, 4, 1)


def inventory(pod: int, *ranks: int) -> Inventory:
    return Inventory.of("10.0.0.1", 5000 + pod, [ShardId(CHECKPOINT, rank) for rank in ranks])


def holds(job: Job, pod: int, *ranks: int) -> None:
    """A pod joins, and holds the shards of these ranks."""
    job.leader.received(pod, Join(f"worker-{pod}", "node", memory=inventory(pod, *ranks)), job.now)


def drains(job: Job, pod: int, *ranks: int) -> None:
    job.leader.received(pod, DrainRequest(inventory(pod, *ranks)), job.now)


def gives(job: Job, pod: int, to: int, *ranks: int) -> None:
    job.leader.received(pod, Transferred(to, [ShardId(CHECKPOINT, rank) for rank in ranks]), job.now)


@pytest.fixture
def job() -> Job:
    """Four pods with one rank each. Pods 2 and 3, where 3 is the partner of 2, have to stop, and all have saved."""
    job = Job(4, least=1)
    job.connect(0, 1, 2, 3)
    for pod in range(4):
        holds(job, pod)
    stop(job, 2, 0)
    stop(job, 3, 0)
    save_and_end(job, [0, 1, 2, 3], 0)
    return job


def started(job: Job, pod: int) -> AttemptStarted | None:
    message = job.sent[pod][-1]
    return message if isinstance(message, AttemptStarted) and message.number else None


def test_shards_that_only_pods_hold_that_stop_go_to_a_pod_that_stays(job: Job) -> None:
    drains(job, 2, 1, 2)
    drains(job, 3, 2, 3)
    holds(job, 0, 0, 3)
    assert not isinstance(job.sent[2][-1], Transfer), "pod 1 may hold the shards"
    holds(job, 1, 0, 1)
    assert job.sent[2][-1] == Transfer(0, "10.0.0.1", 5000, [ShardId(CHECKPOINT, 2)])
    assert job.sent[3][-1] == Release(), "pod 0 holds part 3 and pod 2 gives part 2"
    assert started(job, 0) is None
    gives(job, 2, 0, 2)
    assert job.sent[2][-1] == Release()
    start = started(job, 0)
    assert start is not None
    plans = [message for pod in (0, 1) for message in job.sent[pod] if isinstance(message, MemoryPlan)][1::2]
    assert start.readers == [0, 1, 0, 0]
    assert [plan.restore and plan.restore.holders for plan in plans] == [{0: [0, 1], 2: [0], 3: [0]}, {1: [1]}]
    assert [(plan.partner, plan.copied) for plan in plans] == [(1, 1), (0, 0)]


def test_shards_are_spread_over_the_pods_that_stay(job: Job) -> None:
    drains(job, 2, 2)
    drains(job, 3, 3)
    holds(job, 0, 0)
    holds(job, 1, 1)
    orders = [job.sent[pod][-1] for pod in (2, 3)]
    assert [order.pod for order in orders if isinstance(order, Transfer)] == [0, 1]


def test_another_pod_takes_what_the_first_one_could_not(job: Job) -> None:
    drains(job, 2, 1, 2)
    drains(job, 3, 2, 3)
    holds(job, 0, 0, 3)
    holds(job, 1, 0, 1)
    gives(job, 2, 0)
    assert job.sent[2][-1] == Transfer(1, "10.0.0.1", 5001, [ShardId(CHECKPOINT, 2)])
    gives(job, 2, 1)
    assert job.sent[2][-1] == Release(), "nobody can take the shard"
    assert started(job, 0) is not None
    assert "the checkpoint in memory after step 7 is incomplete: the shard of rank 2 is lost" in job.log


def test_a_launcher_that_breaks_off_is_not_waited_for(job: Job) -> None:
    drains(job, 2, 1, 2)
    drains(job, 3, 2, 3)
    holds(job, 0, 0, 3)
    holds(job, 1, 0, 1)
    job.leader.disconnected(2, "it closed the connection", job.now)
    assert started(job, 0) is not None


def test_a_pod_that_stops_when_the_next_attempt_has_started_hands_over_too(job: Job) -> None:
    job.leader.disconnected(2, "it closed the connection", job.now)
    for pod, ranks in ((3, (2, 3)), (0, (0, 3)), (1, (0, 1))):
        holds(job, pod, *ranks)
    assert started(job, 3) is not None
    drains(job, 3, 2, 3)
    holds(job, 0, 0, 3)
    holds(job, 1, 0, 1)
    assert isinstance(job.sent[3][-1], Transfer)
    gives(job, 3, 0, 2)
    assert job.sent[3][-1] == Release()
    start = started(job, 0)
    assert start is not None
    assert start.pods == [0, 1]
    ended = start.history[-2].failure
    assert ended is not None
    assert (ended.kind, ended.summary) == ("resized", "worker-3 on node received SIGTERM")


def test_the_leader_is_released_last_if_all_stop(job: Job) -> None:
    for pod in (0, 1, 2):
        drains(job, pod, pod)
        assert not isinstance(job.sent[pod][-1], Release)
    drains(job, 3, 3)
    assert [job.sent[pod][-1] for pod in range(4)] == [Release()] * 4


def test_the_messages_of_a_drain_travel() -> None:
    shards = [ShardId(CHECKPOINT, 2)]
    for message in (
        DrainRequest(inventory(2, 1)),
        Transferred(1, shards),
        Transfer(1, "10.0.0.1", 5001, shards),
        Release(),
    ):
        assert MESSAGES.decode(MESSAGES.encode(message)) == message


def test_nothing_is_computed_about_shards_while_no_launcher_has_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of 1,000 pods that join would have the leader go through the shards of all that have joined."""
    looked_at: list[object] = []
    monkeypatch.setattr(memory, "newest_whole", looked_at.append)
    job = Job(4)
    for pod in range(4):
        job.connect(pod)
        holds(job, pod, pod)
    assert job.latest(0).number == 0
    assert looked_at == []
