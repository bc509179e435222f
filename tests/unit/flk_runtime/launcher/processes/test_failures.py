"""Failures as data: root cause, secondary failures, exit codes and reports of ranks."""

from __future__ import annotations

import builtins
import errno
import json
import signal
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from flk_runtime.contract import foreign
from flk_runtime.contract.failure import Failure, Kind, kind_of_text, root_cause
from flk_runtime.contract.record import Attempt
from flk_runtime.errors import SetupError
from flk_runtime.launcher.coordinator.policy import decide
from flk_runtime.launcher.processes.ranks import from_exit_code, from_report
from flk_runtime.launcher.settings import Limits
from flk_runtime.shared.failure_report import describe

CAUSE = Failure(Kind.EXCEPTION, 1, rank=2, time=10.0, type="ValueError")
SECONDARY = Failure(Kind.CONNECTION, 0, rank=0, time=9.0, type="RuntimeError")
# What a rank writes whose peer sends more than it expects.
ENFORCE_NOT_MET = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4
"""  # noqa: E501 - as gloo writes it
# What NCCL's watchdog of torch 2.11 writes when a kernel of its own rank has failed, with an error of CUDA.
WATCHDOG = """[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: \
CUDA error: {0}
CUDA kernel errors might be asynchronously reported at some other API call.
Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:44 (most recent call first):
"""
FRAMES = "frame #0: c10::Error::Error() + 0x80 (0x7f in /x/torch/lib/libc10.so)\n" * 30
THROWN = "terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  "
WATCHDOG = f"[rank0]:[E1126 14:00:00.1 ProcessGroupNCCL.cpp:2057] {WATCHDOG}{FRAMES}{THROWN}{WATCHDOG}{FRAMES}"
ASSERTED, UNCORRECTABLE = map(WATCHDOG.format, ("device-side assert triggered", "uncorrectable ECC error encountered"))
LATER = Failure(Kind.EXIT, 3, rank=7, time=11.0, exit_code=1)
KILLED = Failure(Kind.LOST, 4, time=0.0)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([SECONDARY, CAUSE], CAUSE),  # also when a clock that is behind makes the secondary failure look earlier
        ([LATER, CAUSE, SECONDARY], CAUSE),
        ([SECONDARY], SECONDARY),
        ([SECONDARY, KILLED], KILLED),
    ],
)
def test_the_earliest_failure_that_is_not_secondary_is_the_root_cause(
    failures: list[Failure], expected: Failure
) -> None:
    assert root_cause(failures) == expected


@pytest.mark.parametrize(
    ("type_name", "message", "kind"),
    [
        (
            "RuntimeError",
            "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5",
            Kind.CONNECTION,
        ),
        ("DistBackendError", "NCCL error in: /opt/x/NCCLUtils.cpp:94, remote process exited", Kind.CONNECTION),
        ("DistNetworkError", "failed to recv, got 0 bytes", Kind.CONNECTION),
        (
            "RuntimeError",
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:446] Connection reset by peer",
            Kind.CONNECTION,
        ),
        ("ValueError", "bad", Kind.EXCEPTION),
        ("RuntimeError", "CUDA out of memory", Kind.EXCEPTION),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", Kind.EXCEPTION),
        ("ConnectionRefusedError", "[Errno 111] Connection refused", Kind.EXCEPTION),
        (
            "DistBackendError",
            "NCCL error in: NCCLUtils.cpp:77, invalid usage, ncclInvalidUsage: Duplicate GPU detected : rank 1",
            Kind.EXCEPTION,
        ),
        (
            "DistBackendError",
            "NCCL error in: NCCLUtils.cpp:77\nncclInvalidArgument: Invalid value for an argument.",
            Kind.EXCEPTION,
        ),
        (
            "DistBackendError",
            "NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.28.9\nncclUnhandledCudaError: Call "
            "to CUDA function failed.\nLast error:\nCuda failure 710 'device-side assert triggered'",
            Kind.EXCEPTION,
        ),
        ("DistBackendError", ASSERTED, Kind.EXCEPTION),
        (
            "RuntimeError",
            "[enforce fail at /x/gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4",
            Kind.EXCEPTION,
        ),
    ],
)
def test_broken_connections_are_secondary_and_exceptions_of_user_code_are_not(
    type_name: str, message: str, kind: Kind
) -> None:
    assert kind_of_text(type_name, message) is kind


@pytest.mark.parametrize(
    ("code", "stderr", "oom", "kind"),
    [
        (7, "", False, Kind.EXIT),
        (7, "", True, Kind.EXIT),  # not the rank itself was killed at the memory limit
        (7, "Connection closed by peer", False, Kind.EXIT),
        (137, "", False, Kind.KILLED),  # a shell says so that its child got SIGKILL
        (0, "", False, Kind.EARLY),
        (-signal.SIGKILL, "", True, Kind.OOM),
        (-signal.SIGKILL, "", False, Kind.KILLED),
        (-signal.SIGSEGV, "NCCL", True, Kind.SIGNAL),
        (-signal.SIGABRT, ENFORCE_NOT_MET, False, Kind.SIGNAL),
        (-signal.SIGABRT, ASSERTED, False, Kind.SIGNAL),
        (-signal.SIGABRT, UNCORRECTABLE, False, Kind.GPU),
        (-signal.SIGABRT, "[Rank 3] Watchdog caught collective operation timeout", False, Kind.TIMEOUT),
        (-signal.SIGABRT, "[Rank 3] NCCL error: remote process exited", False, Kind.CONNECTION),
        (-signal.SIGABRT, "NCCL watchdog: CUDA error: uncorrectable ECC error encountered", False, Kind.SIGNAL),
    ],
)
def test_failure_of_a_rank_by_its_exit_code(code: int, stderr: str, oom: bool, kind: Kind) -> None:
    failure = from_exit_code(Failure(Kind.EXIT, 1, rank=2), code, stderr, oom=oom)
    assert (failure.pod, failure.rank, failure.kind) == (1, 2, kind)
    assert (failure.exit_code, failure.signal) == ((code, None) if code >= 0 else (None, -code))


def test_different_collectives_are_named_with_what_to_do() -> None:
    message = ENFORCE_NOT_MET.splitlines()[1].partition("what():  ")[2]
    aborted = from_exit_code(Failure(Kind.EXIT, 1, rank=2), -signal.SIGABRT, ENFORCE_NOT_MET, oom=False)
    raised = describe(RuntimeError(message))
    for told in (aborted.message, raised["message"]):
        assert told.startswith("the ranks called different collectives, or one with other sizes, as where a rank skips")
        assert told.endswith(f"do each of these on all ranks or on none ({message})")


def test_the_last_lines_of_a_rank_are_kept_without_frames_of_the_launcher() -> None:
    frames = [
        '  File "train.py", line 9 in fail',
        '  File "/flk/ship/flk_runtime.zip/flk_runtime/launcher/processes/rank_process.py", line 32 in run',
        '  File "/flk/ship/flk_runtime.zip/flk_runtime/__main__.py", line 24 in main',
        '  File "<frozen runpy>", line 88 in _run_code',
    ]
    before = [f"warning {number}" for number in range(30)]
    stderr = [
        *before,
        "Fatal Python error: Segmentation fault",
        "",
        *frames,
        "",
        "Extension modules: torch._C (total: 1)",
    ]
    failure = from_exit_code(Failure(Kind.EXIT, 1, rank=2), -signal.SIGSEGV, "\n".join(stderr), oom=False)
    assert failure.stderr.splitlines() == [*before[-18:], "Fatal Python error: Segmentation fault", frames[0]]
    assert failure.summary == 'rank 2 in pod 1 was killed by SIGSEGV: File "train.py", line 9 in fail'


@pytest.mark.parametrize(
    ("stderr", "what"),
    [(ASSERTED, "was killed by SIGABRT: [PG ID 0"), (UNCORRECTABLE, "raised DistBackendError: [PG ID 0")],
)
def test_an_error_of_a_rank_s_own_gpu_is_told_by_the_watchdog_of_nccl(stderr: str, what: str) -> None:
    failure = from_exit_code(Failure(Kind.EXIT, 1, rank=2), -signal.SIGABRT, stderr, oom=False)
    assert failure.summary.startswith(f"rank 2 in pod 1 {what}")
    assert "CUDA error: " in failure.summary
    assert not failure.secondary
    assert "frame #" not in failure.stderr


def test_an_invalid_use_of_nccl_is_final_when_it_happens_again() -> None:
    error = type("DistBackendError", (RuntimeError,), {})(
        "NCCL error: ncclInvalidUsage: Duplicate GPU detected : rank 1"
    )
    failure = report_of(error)
    history = attempts(failure, failure)
    assert decide(history[:1], Limits(restarts=3)).restarts == 1
    assert decide(history, Limits(restarts=3)).no_retry_reason == "not retried: failed twice with the same error"


def test_a_kind_that_only_a_later_version_knows_is_read() -> None:
    recorded = {"kind": "of a later version", "news": 1, "message": "the moon is full", "pod": 1, "rank": 2}
    failure = foreign.read(Failure, recorded)
    assert (failure.kind, failure.code, failure.rank) == (Kind.UNKNOWN, 100, 2)
    assert failure.message in failure.summary
    assert foreign.read(Failure, json.loads(json.dumps(asdict(failure)))) == failure


def test_a_rank_that_succeeded_is_the_cause_only_of_secondary_failures() -> None:
    finished = Failure(Kind.EARLY, 3, rank=3, time=1.0, exit_code=0)
    assert root_cause([finished, SECONDARY]) == finished
    assert root_cause([finished, KILLED]) == KILLED
    assert finished.summary == "rank 3 in pod 3 ended with exit code 0 before the other ranks"


@pytest.mark.parametrize("message", ["unexpected keys: " + "layer.weight, " * 30, "x" * 400])
def test_a_long_message_is_cut_after_a_word(message: str) -> None:
    failure = Failure(Kind.EXCEPTION, pod=0, rank=0, type="RuntimeError", message=message)
    line = failure.summary.removeprefix("rank 0 in pod 0 raised RuntimeError: ")
    assert 280 < len(line) <= 300
    assert message.startswith(line.removesuffix("…"))
    assert line.endswith(("weight,…", "x…"))


@pytest.mark.parametrize("earlier", ["Error 802: system not yet initialized", "CUDA error: invalid argument"])
def test_what_a_rank_has_survived_does_not_hide_why_it_aborted(earlier: str) -> None:
    thrown = "terminate called after throwing an instance of 'std::runtime_error'\n  what():  "
    stderr = f"UserWarning: {earlier}\n{thrown}[pair.cc:5] Connection closed by peer\n"
    assert from_exit_code(Failure(Kind.EXIT, 1, rank=2), -signal.SIGABRT, stderr, oom=False).kind is Kind.CONNECTION
    other = f"UserWarning: {earlier}\n{thrown}bad value\n"
    assert from_exit_code(Failure(Kind.EXIT, 1, rank=2), -signal.SIGABRT, other, oom=False).kind is Kind.SIGNAL


def test_build_paths_of_torch_are_not_in_the_summary() -> None:
    message = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5"
    failure = Failure(Kind.EXCEPTION, 0, rank=0, type="RuntimeError", message=message)
    assert failure.summary == "rank 0 in pod 0 raised RuntimeError: Connection closed by peer [10.0.0.1]:5"
    assert failure.message == message


def test_an_error_of_sharded_parameters_says_what_to_do() -> None:
    text = "aten.mul.Tensor got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"
    message = describe(RuntimeError(f"Error(s) in loading state_dict for Net:\n\t{text}"))["message"]
    assert message.startswith(f"{text} (parallelize has sharded the parameters: use parameter.full_tensor()")
    assert "register_fsdp_forward_method names the method)" in message
    assert "\n" not in message
    assert describe(SetupError(text))["message"] == text  # an error of flk says it itself


def test_an_exception_raised_from_a_broken_connection_is_secondary() -> None:
    error = ValueError("step 7 failed")
    assert describe(error)["kind"] is Kind.EXCEPTION
    error.__context__ = RuntimeError("Connection closed by peer")
    assert describe(error)["kind"] is Kind.CONNECTION
    error.__suppress_context__ = True  # as after `raise ... from None`
    assert describe(error)["kind"] is Kind.EXCEPTION


def test_a_broken_connection_of_the_script_is_not_secondary() -> None:
    """A download, or the worker of a DataLoader that was killed."""
    error = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")
    error.__context__ = ConnectionResetError("Connection reset by peer")
    assert describe(error)["kind"] is Kind.EXCEPTION
    assert describe(BrokenPipeError("Broken pipe"))["kind"] is Kind.EXCEPTION


class BaseExceptionGroup(Exception):
    """As that of the package exceptiongroup, which Python 3.10 needs."""

    def __init__(self, text: str, exceptions: Sequence[BaseException]) -> None:
        super().__init__(text)
        self.exceptions = tuple(exceptions)


BROKEN = RuntimeError("[/x/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:5")
BAD = ValueError("bad sample 7")
FULL = OSError(errno.ENOSPC, "No space left on device")


def group(*members: BaseException, context: BaseException | None = None) -> BaseException:
    made: BaseException = getattr(builtins, "ExceptionGroup", BaseExceptionGroup)("in a TaskGroup", members)
    made.__context__ = context
    return made


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("kind_of_group", [getattr(builtins, "ExceptionGroup", BaseExceptionGroup), BaseExceptionGroup])
def test_a_group_of_one_exception_is_reported_as_that_one(kind_of_group: type[BaseExceptionGroup]) -> None:
    error = kind_of_group("outer", [kind_of_group("inner", [BAD])])
    described = describe(error)
    assert (described["kind"], described["type"], described["message"]) == ("exception", "ValueError", "bad sample 7")
    assert "outer" in described["traceback"]


@pytest.mark.parametrize(
    ("members", "kind", "type_name", "message"),
    [
        ([BAD, KeyError("b"), OSError("c")], "exception", "ValueError", "bad sample 7 (and 2 other exceptions)"),
        ([BROKEN, BAD], "exception", "ValueError", "bad sample 7 (and 1 other exception)"),
        ([BAD, group(FULL)], "disk_full", "OSError", f"{FULL} (and 1 other exception)"),
        ([BAD, SetupError("no such strategy")], "usage", "SetupError", "no such strategy (and 1 other exception)"),
        ([BAD, BAD], "exception", "ValueError", "bad sample 7"),  # two tasks have waited for the same one
    ],
)
def test_of_a_group_the_exception_that_counts_most_is_reported(
    members: list[BaseException], kind: str, type_name: str, message: str
) -> None:
    described = describe(group(*members))
    assert (described["kind"], described["type"]) == (kind, type_name)
    assert described["message"].startswith(message)


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (group(BROKEN), True),
        (group(group(BROKEN), BROKEN), True),
        (group(BROKEN, BAD), False),
        (group(BROKEN, BAD, context=BROKEN), False),  # the body of a TaskGroup has lost the connection too
        (group(raised_from(KeyError("a"), BROKEN), raised_from(KeyError("b"), BROKEN)), True),
        (raised_from(ValueError("step 7 failed"), group(BROKEN)), True),
        (raised_from(again := ValueError("raised again"), group(BROKEN, again)), False),
    ],
)
def test_a_group_is_secondary_if_all_in_it_are(error: BaseException, secondary: bool) -> None:
    assert (describe(error)["kind"] is Kind.CONNECTION) == secondary


def report_of(error: BaseException) -> Failure:
    reported = from_report(Failure(Kind.EXCEPTION, 1, rank=2), json.dumps(describe(error)).encode())
    assert reported is not None
    assert reported[1] == ""
    return reported[0]


def test_failure_of_a_rank_by_its_own_report() -> None:
    failure = report_of(ValueError("bad shard"))
    assert failure.summary == "rank 2 in pod 1 raised ValueError: bad shard"
    assert failure.rank == 2  # a report cannot change what the launcher knows itself
    assert from_report(failure, b'{"kind": "exi') is None
    assert from_report(failure, b"7") is None


def test_a_failure_has_no_secret_that_the_exception_names() -> None:
    try:
        raise ValueError("no user has the token canary-7f3b")
    except ValueError as error:
        report = json.dumps(describe(error)).encode()
    reported = from_report(Failure(Kind.EXCEPTION, 1, rank=2), report, ["canary-7f3b"])
    assert reported is not None
    assert reported[0].message == "no user has the token ***"
    assert "ValueError: no user has the token ***" in reported[0].traceback
    assert b"canary-7f3b" in report


def attempts(*failures: Failure | None, first: int = 0) -> list[Attempt]:
    return [Attempt(number, 1.0, 2.0, failure) for number, failure in enumerate(failures, first)]


@pytest.mark.parametrize(
    ("failure", "summary"),
    [
        (Failure(Kind.LOST, 2), "pod 2 was lost"),
        (Failure(Kind.LOST, 2, message="never joined: waited 3 s"), "pod 2 never joined: waited 3 s"),
        (Failure(Kind.LOST, 2, pod_name="vm", message="received SIGTERM"), "vm received SIGTERM"),
        (Failure(Kind.KILLED, 0, rank=1, signal=9), "rank 1 in pod 0 was killed by SIGKILL"),
        (Failure(Kind.EXIT, 0, rank=1, exit_code=7, message="a\nb"), "rank 1 in pod 0 ended with exit code 7: a"),
    ],
)  # fmt: skip
def test_summary_says_which_rank_or_pod_failed_and_how(failure: Failure, summary: str) -> None:
    assert failure.summary == summary
