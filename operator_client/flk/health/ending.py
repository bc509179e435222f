"""Causes of failed jobs: the reason why the first rank or pod ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from flk.health.cause import Cause, Found, condition_evidence, container_path
from flk.health.failure import exit_code_of, first_exception, root_failure
from flk.health.starting import LOOP, LOOP_GRACE, loop
from flk.observe.model import Evidence
from flk.observe.view import JobView
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure, Kind

_NO_MODULE: Final = r"No module named '([^']+)'"
_DISK: Final = r"No space left on device|Errno 28\b|ENOSPC|Disk quota exceeded|Errno 122\b"
_DEVICE_ASSERTION: Final = "device-side assert triggered"
_GPU_MEMORY: Final = r"CUDA out of memory|CUDA error: out of memory|HIP out of memory"
_BUS: Final = 7  # SIGBUS: a rank has used more of /dev/shm than there is
_OF_CODE: Final = (Kind.EXCEPTION, Kind.EXIT, Kind.IO, Kind.STORAGE)  # kinds whose text may say more


def job_failure(view: JobView) -> Failure | None:
    """Return the failure that ended the job; None if it has not failed, or if nothing is known.

    Without a record of flk's launcher it is the first exception in the logs that is not a consequence of another
    rank's end. Without such an exception it is the failure that the containers show.
    """
    if not view.failed:
        return None
    if not view.records:
        raised = first_exception(view)
        if raised:
            return raised
    return root_failure(view)


def failure_evidence(view: JobView, failure: Failure) -> list[Evidence]:
    """Return where a failure was read."""
    source = f"rank {failure.rank}" if failure.rank is not None else failure.pod_name or f"pod {failure.pod}"
    recorded = any(failure.pod_name and record.failure for record in view.records)
    last = [line for line in failure.details.splitlines() if line.strip()]
    if last:
        where = f"{'record of the launcher' if recorded else 'log'} of {source}"
        found = [Evidence(where, last[-1].strip(), time=failure.time)]
    else:
        where = f"record of the launcher of {source}" if recorded else f"pod {failure.pod_name or failure.pod}"
        found = [
            Evidence(where, failure.summary, "" if recorded else container_path(view, "state.terminated"), failure.time)
        ]
    if "Failed" in view.conditions:
        found.append(_condition(view))
    return found


def _condition(view: JobView) -> Evidence:
    """Return why the operator calls the job failed."""
    return condition_evidence(view.subject, {"type": "Failed", **view.conditions.get("Failed", {})})


def _ended(
    matches: Callable[[Failure], bool],
    remedy: Callable[[JobView, Failure], str],
    unrecorded: ExitCode | None = None,
) -> Callable[[JobView], Found | None]:
    """Return a Find for failures that match.

    ``unrecorded`` is the exit code of a job without records; the kind of a recorded failure says its own.
    """

    def find(view: JobView) -> Found | None:
        failure = job_failure(view)
        if failure is None or not matches(failure):
            return None
        name = view.pod_of(failure)
        return Found(
            failure.summary,
            remedy(view, failure),
            failure_evidence(view, failure),
            [name] if name else [],
            since=failure.time,
            exit_code=exit_code_of(failure) if unrecorded is None or view.records else unrecorded,
        )

    return find


def _logs(view: JobView, failure: Failure) -> str:
    rank = f" --rank {failure.rank}" if failure.rank is not None else ""
    return f"{view.flk('logs')}{rank} shows what was printed before"


def _image_or_logs(view: JobView, failure: Failure) -> str:
    missing = re.fullmatch(r"the image has no (\S+)", failure.message)  # as flk.manifest.pod has the pod say
    if missing is None:
        return _logs(view, failure)
    return f"choose an image that has Python 3.10 or newer and torch; {view.image} has no {missing[1]}: --image"


def _raised(failure: Failure, *types: str) -> bool:
    return failure.kind is Kind.EXCEPTION and failure.type.rpartition(".")[2] in types


def _missing_module(failure: Failure) -> str:
    """Return the module that Python did not find, in a rank or for the launcher; empty: it found all."""
    if failure.kind not in (Kind.EXCEPTION, Kind.USAGE):
        return ""
    match = re.search(_NO_MODULE, f"{failure.message}{failure.stderr}")
    return match[1] if match else ""


def _install(view: JobView, failure: Failure) -> str:
    module = _missing_module(failure)
    if module == "torch":
        return f"choose an image with torch; {view.image} has none: --image"
    return (
        f"install {module or 'the package'} with --pip or --requirements, add it to the image, or ship it with the code"
    )


def _is_disk_full(failure: Failure) -> bool:
    text = f"{failure.type}: {failure.message}\n{failure.stderr}"
    return failure.kind is Kind.DISK_FULL or (failure.kind in _OF_CODE and re.search(_DISK, text) is not None)


def _deadline(view: JobView) -> Found | None:
    condition = view.conditions.get("Failed") or {}
    failure = job_failure(view)
    by_operator = condition.get("reason") == "DeadlineExceeded" or "deadline" in str(condition.get("message"))
    by_launcher = failure is not None and failure.kind is Kind.DEADLINE
    if not by_launcher and not (by_operator and (failure is None or failure.signal is not None)):
        return None
    text = failure.summary if failure and by_launcher else f"job {view.name} reached the job's deadline"
    evidence = failure_evidence(view, failure) if failure and by_launcher else []
    if by_operator:
        evidence.append(_condition(view))
    return Found(text, "submit with a longer --deadline; with --checkpoint the job continues where it ended", evidence)


def _unknown_end(view: JobView) -> Found | None:
    if not view.failed or view.sent_away or job_failure(view) is not None:
        return None
    evidence = _condition(view)
    return Found(
        f"the job failed, and its pods have left no trace: {evidence.text or 'the operator gives no reason'}",
        f"{view.flk('logs')} shows what is left of the logs; {view.flk('wait')} keeps evidence while a job runs",
        [evidence],
    )


def _larger_memory(view: JobView, failure: Failure) -> str:
    limit = view.memory_limit(failure.pod_name)
    return f"submit with a larger --memory{f' than {limit}' if limit else ''}, or use a smaller batch or fewer workers"


_of_memory: Final = _ended(lambda failure: failure.kind is Kind.OOM, _larger_memory)


def _killed_at_its_limit(view: JobView) -> Found | None:
    """Find the end of a job, and containers that are killed again and again, of which no launcher tells."""
    found = loop(view) if not view.failed else None
    if found is None or not found[1].out_of_memory:
        return _of_memory(view)
    name, last = found
    limit = view.memory_limit(name)
    times = f", {len(last.lives)} times" if len(last.lives) > 1 else ""
    return Found(
        f"the container of {name} was killed at its memory limit{f' of {limit}' if limit else ''}{times}",
        f"submit with a larger --memory{f' than {limit}' if limit else ''}",
        [last.evidence],
        [name],
        since=last.lives[:LOOP][-1][1],
        resolves_itself=len(last.lives) < LOOP,
        grace=LOOP_GRACE,
    )


CAUSES: Final = (
    Cause(
        "DeadlineExceeded",
        _deadline,
        ExitCode.TIMEOUT,
    ),
    Cause(
        "OutOfMemory",
        _killed_at_its_limit,
    ),
    Cause(
        "GpuOutOfMemory",
        _ended(
            lambda f: (
                _raised(f, "OutOfMemoryError") or bool(f.kind is Kind.EXCEPTION and re.search(_GPU_MEMORY, f.message))
            ),
            lambda view, failure: "use a smaller batch, --strategy full_shard, or activation checkpointing",
        ),
        ExitCode.TRAINING,
    ),
    Cause(
        "DeviceAssertion",
        _ended(
            lambda f: f.kind in (*_OF_CODE, Kind.SIGNAL) and _DEVICE_ASSERTION in f.message,
            lambda view, failure: (
                "check the indices: tokens below the vocabulary, labels below the number of classes; the traceback "
                "ends at the operation in a job that is submitted with --env CUDA_LAUNCH_BLOCKING=1"
            ),
        ),
        ExitCode.TRAINING,
    ),
    Cause(
        "DiskFull",
        _ended(
            _is_disk_full,
            lambda view, failure: (
                "free space or use a larger volume; the traceback names the file: " + view.flk("status")
            ),
            ExitCode.INFRASTRUCTURE,
        ),
    ),
    Cause(
        "VolumeFailed",
        _ended(
            lambda failure: failure.kind in (Kind.IO, Kind.STORAGE, Kind.READ_ONLY),
            lambda view, failure: (
                f"{view.kubectl('get persistentvolumeclaims')} shows the volumes; have them checked, or write to "
                "another folder where a volume is read-only"
            ),
        ),
    ),
    Cause(
        "NodeUnhealthy",
        _ended(
            lambda failure: failure.kind in (Kind.GPU, Kind.UNHEALTHY, Kind.UNKILLABLE),
            lambda view, failure: (
                f"{view.kubectl_of_cluster('cordon ' + (failure.node or 'NODE'))} keeps jobs off the node; have it "
                f"checked, then {view.again()}"
            ),
        ),
    ),
    Cause(
        "ImportFailed",
        _ended(lambda failure: bool(_missing_module(failure)) or _raised(failure, "ImportError"), _install),
        ExitCode.TRAINING,
    ),
    Cause(
        "RankHung",
        _ended(
            lambda failure: failure.kind is Kind.HANG,
            lambda view, failure: (
                f"{view.flk('status')} shows the stack of the rank that hung, and {view.flk('logs')} all stacks; "
                "a larger --hang-timeout waits longer"
            ),
        ),
    ),
    Cause(
        "RendezvousTimeout",
        _ended(
            lambda failure: failure.kind in (Kind.RENDEZVOUS, Kind.ABSENT),
            lambda view, failure: (
                f"{view.kubectl('get pods')} shows which pods did not run; a larger FLK_JOIN_TIMEOUT waits longer"
            ),
        ),
        explained_by="any",
    ),
    Cause(
        "PodLost",
        _ended(
            lambda failure: failure.kind in (Kind.LOST, Kind.PREEMPTED, Kind.CONTAINER_KILLED),
            lambda view, failure: (
                f"{view.kubectl('get events')} shows what happened to the pod; submit with more --disruptions"
            ),
        ),
        explained_by="any",
    ),
    Cause(
        "InvalidStart",
        _ended(lambda failure: failure.kind in (Kind.USAGE, Kind.MISMATCH), _image_or_logs),
        ExitCode.USAGE,
    ),
    Cause(
        "ExceptionRaised",
        _ended(lambda failure: bool(failure.type), _logs),
        ExitCode.TRAINING,
    ),
    Cause(
        "SharedMemoryTooSmall",
        _ended(
            lambda failure: failure.kind is Kind.SIGNAL and failure.signal == _BUS,
            lambda view, failure: "submit with a larger --shm, or use fewer workers of the data loader",
        ),
        ExitCode.TRAINING,
    ),
    Cause(
        "RankFailed",
        _ended(lambda failure: True, _logs),
        ExitCode.TRAINING,
        explained_by="same pod",
    ),
    Cause(
        "FailedWithoutTrace",
        _unknown_end,
        explained_by="any",
    ),
)


def _deleted(view: JobView) -> Found | None:
    if view.gone is None or view.failed or view.succeeded:
        return None
    return Found(
        "the job was deleted before it had ended",
        "submit it again; with the same name and --checkpoint it goes on from its newest checkpoint. The API server's "
        "audit log says who deleted it",
        [Evidence(view.subject, "it does not exist any more", "metadata", view.gone)],
    )


DELETION: Final = (
    Cause(
        "Deleted",
        _deleted,
        ExitCode.CANCELLED,
    ),
)
