"""Which of several failures is the cause, and which are secondary: consequences of it in other ranks."""

from __future__ import annotations

import pytest

from flk_runtime.contract import Failure
from flk_runtime.launcher.failures import root_cause
from flk_runtime.system.report import is_secondary

CAUSE = Failure("exception", 1, rank=2, time=10.0, type="ValueError")
SECONDARY = Failure("exception", 0, rank=0, time=9.0, type="RuntimeError", secondary=True)
LATER = Failure("exit", 3, rank=7, time=11.0, exit_code=1)
KILLED = Failure("lost", 4, time=0.0)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([SECONDARY, CAUSE], CAUSE),  # also when a clock that is behind makes the secondary failure look earlier
        ([LATER, CAUSE, SECONDARY], CAUSE),
        ([SECONDARY], SECONDARY),
        ([SECONDARY, KILLED], KILLED),
    ],
)
def test_the_earliest_primary_failure_is_the_cause(failures: list[Failure], expected: Failure) -> None:
    assert root_cause(failures) == expected


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("RuntimeError", "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5"),
        ("DistBackendError", "NCCL error in: /opt/x/NCCLUtils.cpp:94, remote process exited"),
        ("DistNetworkError", "failed to recv, got 0 bytes"),
        ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:446] Connection reset by peer"),
    ],
)
def test_broken_connections_are_secondary(type_name: str, message: str) -> None:
    assert is_secondary(type_name, message)


@pytest.mark.parametrize(
    ("type_name", "message"),
    [
        ("ValueError", "bad"),
        ("RuntimeError", "CUDA out of memory"),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied"),
        ("ConnectionRefusedError", "[Errno 111] Connection refused"),
    ],
)
def test_the_users_own_exceptions_are_not(type_name: str, message: str) -> None:
    assert not is_secondary(type_name, message)
