"""Jobs of three workers in the states that users meet, for the commands that show jobs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.log_format import RECORD_MARKER
from flk_runtime.contract.record import Attempt, Goodput, JobRecord, QuarantinedNode, SlowRank
from flk_runtime.launcher.coordinator.policy import decide
from flk_runtime.launcher.records.history import job_record, new_record
from flk_runtime.launcher.settings import Limits
from tests.support.api_server import FakeApiServer
from tests.support.jobs import MADE, NOW, JobBuilder

START = NOW - 60  # when everything was created
TRACEBACK = """\
Traceback (most recent call last):
  File "/flk/work/train.py", line 31, in <module>
    main()
  File "/flk/work/train.py", line 24, in main
    loss = model(batch)
ValueError: expected 512 features, got 511
"""
RAISED = Failure(
    Kind.EXCEPTION,
    1,
    1,
    "gpt-worker-1",
    "node-b",
    0,
    START + 40,
    "ValueError",
    "expected 512 features, got 511",
    TRACEBACK,
)
KILLED = Failure(Kind.KILLED, 2, 2, "gpt-worker-2", "node-c", 0, START + 40, signal=9)
LOST = Failure(Kind.LOST, 2, None, "gpt-worker-2", time=START + 40, message="was restarted")
OUT_OF_MEMORY = Failure(Kind.OOM, 0, 0, "gpt-worker-0", "node-a", 0, START + 40, exit_code=137)
HANG = Failure(
    Kind.HANG,
    1,
    1,
    "gpt-worker-1",
    "node-b",
    0,
    START + 40,
    message="did not reach all_reduce 812; it waits in its DataLoader at train.py:31",
    traceback="torch/utils/data/dataloader.py:1291 in _try_get_data\ntrain.py:31: for batch in loader:",
)
DEADLINE = Failure(
    Kind.DEADLINE, 0, None, "gpt-worker-0", "node-a", 0, START + 50, message="50 s since the job started"
)
USAGE = Failure(Kind.USAGE, 0, 0, "gpt-worker-0", "node-a", 0, START + 5, message="FLK_SEED=x is not a whole number")
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: 0/3 nodes are available: "
    "3 No preemption victims found for incoming pod.",
}
PULL = {
    "waiting": {
        "reason": "ImagePullBackOff",
        "message": 'Back-off pulling image "registry.example/trian:1": ErrImagePull: not found',
    }
}


def attempts(*failures: Failure | None) -> list[Attempt]:
    """Attempts of 40 s each; the last one runs if its failure is None."""
    begun = [START + 5 + 60 * number for number in range(len(failures))]
    made: list[Attempt] = []
    for n, (start, failure) in enumerate(zip(begun, failures, strict=True)):
        used = decide(made, Limits(restarts=100))
        end = start + 40 if failure else None
        made.append(Attempt(n, start, end, failure and replace(failure, attempt=n), used.restarts, used.disruptions))
    return made


def ended_with(failure: Failure | None, *history: Failure | None, restarts: int = 3) -> JobRecord:
    ended, limits = attempts(*(history or (failure,))), Limits(restarts)
    return job_record(failure, ended, limits, decide(ended, limits).no_retry_reason)


def log_of(rank: int, record: JobRecord | None = None) -> str:
    lines = [f"[rank {rank}] step 10 loss 2.31", f"[rank {rank}] step 20 loss 2.07"]
    if record:
        lines.insert(0, f"[pod {rank}] {RECORD_MARKER}{record.to_json()}")
    return "\n".join(lines) + "\n"


def new(**how: Any) -> JobBuilder:
    """A job with an owner, as `flk submit` creates it."""
    builder = JobBuilder(**how)
    builder.container["image"] = "registry.example/train:1"
    builder.job["metadata"]["annotations"] = {"flk.dev/owner": "ada@laptop", "flk.dev/user": "ada"}
    builder.job["metadata"]["labels"] = {"flk.dev/job": builder.name}
    return builder


def created(name: str = "gpt") -> JobBuilder:
    builder = new(name=name)
    builder.job["status"] = {}
    return builder


def queued() -> JobBuilder:
    builder = new()
    builder.job["spec"]["runPolicy"]["suspend"] = True
    builder.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gold"
    return builder


def suspended() -> JobBuilder:
    builder = new()
    builder.job["spec"]["runPolicy"]["suspend"] = True
    return builder


def unschedulable(name: str = "gpt") -> JobBuilder:
    return new(name=name).all("pod", "Pending", node="", conditions=[UNSCHEDULABLE])


def image_missing() -> JobBuilder:
    return new().all("pod", "Pending", PULL)


def quota() -> JobBuilder:
    builder = new()
    builder.event(
        "FailedCreatePod",
        'Error creating: pods "gpt-worker-0" is forbidden: exceeded quota: team, requested: cpu=8, used: cpu=60, '
        "limited: cpu=64",
    )
    return builder


def running(name: str = "gpt") -> JobBuilder:
    return new(name=name).condition("Running").all("pod")


def restarting() -> JobBuilder:
    """The third pod was lost; its successor is on its way, the other ranks wait for it."""
    builder = new().condition("Running").all("pod")
    return builder.pod(2, "Pending", {"waiting": {"reason": "ContainerCreating"}}, node="node-c")


def succeeded(name: str = "gpt") -> JobBuilder:
    builder = new(name=name).condition("Succeeded")
    builder.job["status"]["startTime"] = MADE
    builder.job["status"]["completionTime"] = "2026-01-01T00:00:50Z"
    return builder.all("ended", 0, ended_with(None).to_json(), at=50)


MESSAGE_OF_OPERATOR = "PyTorchJob gpt is failed because 1 Worker replica(s) failed."


def failed(failure: Failure, *history: Failure | None, restarts: int = 3) -> JobBuilder:
    record = ended_with(failure, *history, restarts=restarts)
    code = int(failure.code)
    return (
        new().condition("Failed", MESSAGE_OF_OPERATOR, "PyTorchJobFailed").all("ended", code, record.to_json(), at=45)
    )


def evicted() -> JobBuilder:
    """A pod that its node has evicted, without a word of its launcher."""
    builder = new().condition("Failed", MESSAGE_OF_OPERATOR, "PyTorchJobFailed").all("pod")
    builder.pod(1, "Failed", {}, reason="Evicted", message="The node was low on resource: ephemeral-storage.")
    return builder


def stopping() -> JobBuilder:
    builder = running()
    builder.job["metadata"]["deletionTimestamp"] = "2026-01-01T02:05:00Z"
    return builder


JOBS = {
    "created": created,
    "queued": queued,
    "suspended": suspended,
    "unschedulable": unschedulable,
    "image missing": image_missing,
    "quota exceeded": quota,
    "running": running,
    "restarting": restarting,
    "succeeded": succeeded,
    "exception on rank 1": lambda: failed(RAISED, restarts=0),
    "exception after three attempts": lambda: failed(RAISED, KILLED, LOST, RAISED, restarts=1),
    "out of memory": lambda: failed(OUT_OF_MEMORY, restarts=0),
    "hang": lambda: failed(HANG, restarts=0),
    "slow rank": running,
    "deadline": lambda: failed(DEADLINE),
    "usage error in a rank": lambda: failed(USAGE),
    "evicted": evicted,
    "being deleted": stopping,
}
# How the records of jobs that run are found: in the log of pod 0.
RECORDS = {
    "running": new_record("running", 0, None, attempts(None), Limits(3)),
    "restarting": replace(
        new_record("running", 0, None, attempts(LOST), Limits(3)),
        quarantine=[QuarantinedNode("node-c", "gpt-worker-1 was lost: connection closed")],
    ),
    "slow rank": replace(
        new_record("running", 0, None, attempts(None), Limits(3)),
        slow=[SlowRank(1, "gpt-worker-1", "node-b", 2.1)],
        goodput=Goodput(NOW - 10, {"waiting": 2.0, "starting": 7.5, "saving": 0.25, "computing": 40.25}, 1, 25),
        saved=40,
        stored=20,
    ),
}


def add(server: FakeApiServer, which: str) -> JobBuilder:
    """Put one of these jobs and the logs of its pods into the server."""
    builder = JOBS[which]().add_to(server)
    if which == "queued":
        said = {"type": "QuotaReserved", "status": "False", "message": "insufficient quota for nvidia.com/gpu"}
        meta = {"name": "pytorchjob-gpt", "labels": {"kueue.x-k8s.io/job-uid": builder.job["metadata"]["uid"]}}
        server.add("workloads", {"metadata": meta, "status": {"conditions": [said]}})
    for index, pod in builder.pods.items():
        if pod["status"]["phase"] != "Pending":
            record = RECORDS.get(which) if index == 0 else None
            server.written[pod["metadata"]["name"]] = log_of(index, record)
    return builder
