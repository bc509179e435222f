"""Messages of the rendezvous: each decodes to what was encoded."""

from __future__ import annotations

import pytest

from flk_runtime.contract import Attempt, Failure, JobRecord
from flk_runtime.launcher.rendezvous import AttemptStarted, JobEnded
from flk_runtime.launcher.rendezvous.messages import Join, decode_end, decode_start, encode_end, encode_start

FAILURE = Failure("exception", 1, 3, "gpt-worker-1", "node-a", 2, 10.5, "ValueError", "bad\nshard", secondary=True)
HISTORY = [Attempt(2, 1.0, 2.0, FAILURE), Attempt(3, 2.5)]


def test_join() -> None:
    join = Join("a1b2", "gpt-worker-1", "node-a", HISTORY, [FAILURE])
    assert Join.from_json(join.to_json().encode()) == join


@pytest.mark.parametrize(
    "decision",
    [
        AttemptStarted(round=4, number=3, master_address="10.0.0.1", master_port=4711, history=HISTORY),
        JobEnded(JobRecord("failed", 100, 3, FAILURE, HISTORY)),
        JobEnded(JobRecord("succeeded", 0)),
    ],
)
def test_decision_of_the_leader(decision: AttemptStarted | JobEnded) -> None:
    assert decode_start(encode_start(decision).encode()) == decision


@pytest.mark.parametrize("failure", [FAILURE, None])
def test_end_of_an_attempt(failure: Failure | None) -> None:
    assert decode_end(encode_end(failure).encode()) == failure
