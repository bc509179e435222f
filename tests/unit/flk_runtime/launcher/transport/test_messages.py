"""Messages of the rendezvous: each decodes to what was encoded, and what is no message is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord, QuarantinedNode, SlowRank, Standstill
from flk_runtime.contract.status import Phase, RankStatus
from flk_runtime.contract.telemetry import GpuUsage, PodStatus, PodUsage
from flk_runtime.launcher.hangs.snapshot import Frame, Snapshot
from flk_runtime.launcher.preemption import Boundary
from flk_runtime.launcher.replication import Inventory, MemoryPlan
from flk_runtime.launcher.replication.plan import CheckpointId, Restore, ShardId
from flk_runtime.launcher.transport.messages import (
    MESSAGES,
    AttemptEnded,
    AttemptStarted,
    BoundaryReport,
    FailureReport,
    Heartbeat,
    Hello,
    JobEnded,
    Join,
    Leave,
    Message,
    PreemptionRequest,
    PreemptionStarted,
    Question,
    RanksEnded,
    Reply,
    Restored,
    SaveAt,
    StacksReport,
    StacksRequested,
    Stopping,
    SuccessReport,
    Topic,
    Unreadable,
    WaitsChanged,
    Welcome,
)
from flk_runtime.shared.observer import Pending
from flk_runtime.wire import MessageError, Refused
from tests.support.messages import check_types, replaced

FAILURE = Failure(Kind.EXCEPTION, 1, 3, "gpt-worker-1", "node-a", 2, 10.5, "ValueError", "bad\nshard")
SHARD = ShardId(CheckpointId("a1b2", 7, 2, 1), 1)
RESTORE = Restore(SHARD.checkpoint, {0: [1, 0], 1: [1]})
PLAN = MemoryPlan("c3d4", 1, 0, {1: ("10.0.0.2", 80)}, RESTORE, [SHARD.checkpoint])
STACK = (Frame("train.py", 7, Phase.TRAINING, "loss.backward()"), Frame("train.py", 9, "<module>"))
COLLECTIVE = Pending("nccl:0", 812, "all_reduce", "[[4]]")
HISTORY = [Attempt(2, 1.0, 2.0, FAILURE), Attempt(3, 2.5)]


EXAMPLES: list[Message] = [
    Hello(1, "a1b2", 12.5),
    Welcome("leader"),
    Refused("why"),
    Join("gpt-worker-1", "node-a", HISTORY, [FAILURE]),
    FailureReport(3, FAILURE),
    SuccessReport(3),
    Heartbeat(),
    Heartbeat(PodStatus(3, [RankStatus(0, 1, 12, beat=0.5, samples=3, pending=1)])),
    Heartbeat(PodStatus(3, [], PodUsage(1, "gpt-worker-1", "node-a", 1.5, 0.5, gpus=[GpuUsage(0.5, 1, 2)]))),
    StacksReport(1, [Snapshot(3, 1, main=STACK, threads=(STACK,), groups={"0": 7}, pending=(COLLECTIVE,))]),
    Join("gpt-worker-1", "node-a", memory=Inventory.of("10.0.0.1", 4711, [SHARD]), step=7),
    Restored(3, 7, "memory"),
    Unreadable(3, SHARD.checkpoint),
    Leave(),
    Stopping(),
    PreemptionRequest(3, FAILURE),
    PreemptionStarted(3, FAILURE),
    BoundaryReport(3, [Boundary(7, True), Boundary(-1, False)]),
    SaveAt(3, 8),
    RanksEnded(3, 8),
    RanksEnded(3, None),
    AttemptStarted(number=3, master_address="10.0.0.1", master_port=4711, history=HISTORY, order="0"),
    AttemptStarted(3, "10.0.0.1", 4711, HISTORY, "1,0", [0, 1], PLAN),
    PLAN,
    AttemptEnded(3, FAILURE),
    JobEnded(JobRecord("failed", 100, 3, FAILURE, HISTORY)),
    JobEnded(JobRecord("succeeded", 0)),
    JobEnded(
        JobRecord(
            "running", 0, slow=[SlowRank(3, "gpt-worker-1", "node-a", 2.5)], quarantine=[QuarantinedNode("node-b")]
        )
    ),
    Question(Topic.METRICS, "a"),
    StacksRequested(1),
    Reply("a", {"cause": ""}),
    WaitsChanged([SlowRank(3, "gpt-worker-1", "node-a", 2.5)], Standstill(7.5, "rank 1 sleeps", "gpt-worker-1")),
]


def mutants(message: Message) -> Iterator[bytes]:
    """The encoded message, with one value replaced by another one."""
    name, fields = json.loads(MESSAGES.encode(message))
    yield from (json.dumps([name, each]).encode() for each in replaced(fields))


def test_there_is_an_example_of_each_message() -> None:
    assert {type(each) for each in EXAMPLES} == set(MESSAGES._classes.values())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_with_another_value_is_refused_or_has_values_of_the_right_types(message: Message) -> None:
    for data in mutants(message):
        try:
            found = MESSAGES.decode(data)
        except MessageError:
            continue
        assert type(found) is type(message)
        assert MESSAGES.decode(MESSAGES.encode(found)) == found
        check_types(found, type(found))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_decodes_to_itself(message: Message) -> None:
    assert MESSAGES.decode(MESSAGES.encode(message)) == message
