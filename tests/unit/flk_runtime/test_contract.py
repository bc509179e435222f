"""Job records in logs and termination messages, exit codes of failures, reserved names of variables."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flk_runtime.contract import ExitCode, log_format, pod_layout, user_env
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.log_format import is_record, parse_record
from flk_runtime.contract.record import (
    ArchivedRecord,
    Attempt,
    Goodput,
    JobRecord,
    QuarantinedNode,
    SlowRank,
    Standstill,
)
from tests.support.messages import check_types, replaced

TEXT = st.text(max_size=8000)
FAILURES = st.builds(
    Failure,
    kind=st.sampled_from(Kind),
    pod=st.integers(0, 4096),
    rank=st.none() | st.integers(0, 65536),
    type=st.text(max_size=50),
    message=TEXT,
    traceback=TEXT,
)
ATTEMPTS = st.lists(
    st.builds(Attempt, st.integers(0, 1000), st.floats(0, 2e9), st.none() | st.floats(0, 2e9), st.none() | FAILURES),
    max_size=5,
)
RECORDS = st.builds(
    JobRecord, st.just("failed"), st.integers(0, 255), st.integers(0, 9), st.none() | FAILURES, ATTEMPTS
)


@given(RECORDS)
def test_a_record_is_one_line_and_decodes_to_an_equal_record(record: JobRecord) -> None:
    line = f"[pod 0] {log_format.RECORD_MARKER}{record.to_json()}"
    assert "\n" not in line
    assert is_record(line)
    assert parse_record(line) == record


@given(RECORDS)
def test_a_termination_message_fits_and_keeps_outcome_code_and_cause(record: JobRecord) -> None:
    text = record.to_json(pod_layout.TERMINATION_LOG_LIMIT)
    assert len(text.encode()) <= pod_layout.TERMINATION_LOG_LIMIT
    kept = JobRecord.from_json(text)
    assert kept is not None
    assert (kept.outcome, kept.code) == (record.outcome, record.code)
    if record.failure:
        assert kept.failure is not None
        assert (kept.failure.kind, kept.failure.rank, kept.failure.pod) == (
            record.failure.kind,
            record.failure.rank,
            record.failure.pod,
        )


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", "7", '{"outcome": "failed"}', "Traceback (most recent call last):", '{"code": 1}']
)
def test_text_without_a_record_decodes_to_none(text: str) -> None:
    assert JobRecord.from_json(text) is None
    assert parse_record(text) is None


RECORD = JobRecord(
    "failed",
    100,
    failure=Failure(Kind.EXIT, 1, 2, exit_code=1, step=7),
    attempts=[Attempt(0, 1.0, 2.5, Failure(Kind.LOST, 1), step=7, pods="0-1", restored=3)],
    slow=[SlowRank(3, "gpt-worker-1", "node-a", 2.5)],
    standstill=Standstill(7.5, "rank 1 sleeps", "gpt-worker-1"),
    quarantine=[QuarantinedNode("node-a", "gpt-worker-1 was lost", 9.5)],
    goodput=Goodput(9.5, {"computing": 7.0, "starting": 1.5}, 1, 7),
)


@pytest.mark.parametrize("kind", [JobRecord, ArchivedRecord])
def test_a_record_with_a_value_of_another_type_decodes_to_none(kind: type[JobRecord | ArchivedRecord]) -> None:
    """Whoever compares the times of failures, or computes with steps, gets numbers."""
    record = (
        RECORD if kind is JobRecord else ArchivedRecord("gpt", "uid-1", 2, 4, 1.0, 2.0, RECORD, step=7, lines=["x"])
    )
    assert kind.from_json(record.to_json()) == record
    refused = 0
    for data in replaced(json.loads(record.to_json())):
        found = kind.from_json(json.dumps(data))
        if found is None:
            refused += 1
        else:
            check_types(found, kind)
    assert refused > 300


def test_a_record_in_the_output_of_a_rank_is_ignored() -> None:
    line = f"[rank 0] {log_format.RECORD_MARKER}" + JobRecord("succeeded", 0).to_json()
    assert not is_record(line)
    assert parse_record(line) is None


def test_unknown_fields_of_a_newer_version_are_ignored() -> None:
    data = json.loads(JobRecord("failed", 100, 0, Failure(Kind.EXIT, 1)).to_json())
    data["new"] = 1
    data["failure"]["new"] = 1
    record = JobRecord.from_json(json.dumps(data))
    assert record is not None
    assert record.failure == Failure(Kind.EXIT, 1)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Kind.EXCEPTION, ExitCode.TRAINING),
        (Kind.EXIT, ExitCode.TRAINING),
        (Kind.SIGNAL, ExitCode.TRAINING),
        (Kind.OOM, ExitCode.INFRASTRUCTURE),
        (Kind.LOST, ExitCode.INFRASTRUCTURE),
        (Kind.DEADLINE, ExitCode.TIMEOUT),
        (Kind.USAGE, ExitCode.USAGE),
    ],
)
def test_the_kind_of_failure_decides_the_exit_code(kind: Kind, code: ExitCode) -> None:
    assert Failure(kind, 0).code is code


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "PET_NNODES", "FLK_POD_INDEX", "TORCHELASTIC_RUN_ID"]
)
def test_names_that_the_operator_torch_or_flk_set_are_reserved(name: str) -> None:
    assert user_env.is_reserved(name)


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "OMP_NUM_THREADS", "MY_RANK", "FLK_SAVE_EVERY", "rank"])
def test_other_names_are_not_reserved(name: str) -> None:
    assert not user_env.is_reserved(name)


def test_marks_of_attempts_are_for_programs() -> None:
    assert log_format.parse_attempt("[pod 12] flk-attempt 3") == 3
    assert log_format.is_record("[pod 12] flk-attempt 3")
    for line in ("[rank 0] flk-attempt 3", "flk-attempt 3", "[pod 0] flk-attempt x", "[pod 0] flk-attempt 3 more"):
        assert log_format.parse_attempt(line) is None
        assert not log_format.is_record(line)
