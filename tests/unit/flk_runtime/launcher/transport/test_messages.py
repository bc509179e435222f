"""Messages of the rendezvous: each decodes to what was encoded, and what is no message is refused."""

from __future__ import annotations

import pytest

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.launcher.preemption import Boundary
from flk_runtime.launcher.transport import AttemptEnded, AttemptStarted, JobEnded
from flk_runtime.launcher.transport.messages import (
    BoundaryReport,
    Challenge,
    FailureReport,
    Heartbeat,
    Hello,
    Join,
    Leave,
    Message,
    MessageError,
    PreemptionRequest,
    PreemptionStarted,
    RanksEnded,
    Refused,
    SaveAt,
    SuccessReport,
    decode,
    encode,
)

FAILURE = Failure(Kind.EXCEPTION, 1, 3, "gpt-worker-1", "node-a", 2, 10.5, "ValueError", "bad\nshard")
HISTORY = [Attempt(2, 1.0, 2.0, FAILURE), Attempt(3, 2.5)]


@pytest.mark.parametrize(
    "message",
    [
        Hello("gpt", "uid", 1, 2, "a1b2", 1795320052.5, "nonce"),
        Challenge("leader", "nonce", "proof"),
        Refused("why"),
        Join("gpt-worker-1", "node-a", HISTORY, [FAILURE]),
        FailureReport(3, FAILURE),
        SuccessReport(3),
        Heartbeat({"step": 12}),
        Leave(),
        PreemptionRequest(3, FAILURE),
        PreemptionStarted(3, FAILURE),
        BoundaryReport(3, [Boundary(7, True), Boundary(-1, False)]),
        SaveAt(3, 8),
        RanksEnded(3, 8),
        RanksEnded(3, None),
        AttemptStarted(number=3, master_address="10.0.0.1", master_port=4711, history=HISTORY),
        AttemptEnded(3, FAILURE),
        JobEnded(JobRecord("failed", 100, 3, FAILURE, HISTORY)),
        JobEnded(JobRecord("succeeded", 0)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_is_one_line_and_decodes_to_itself(message: Message) -> None:
    line = encode(message)
    assert b"\n" not in line
    assert decode(line) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"GET / HTTP/1.1",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"type": "Event"}',
        b'{"type": "Leave", "extra": 1}',
        b'{"type": "SuccessReport", "attempt": "3"}',
        b'{"type": "SuccessReport", "attempt": true}',
        b'{"type": "Hello", "job": "gpt"}',
        b'{"type": "JobEnded", "record": []}',
        b"[" * 3000,
    ],
)
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line)
