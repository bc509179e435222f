"""A report about a job that has trained, hung and failed, with every section full, for tests of the page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flk.report.build import LINE, LINES, build
from flk.report.model import Excerpt, Report
from flk.spec import labels
from flk_runtime.contract.failure import Failure, Kind
from flk_runtime.contract.record import TIME_CAUSES, Attempt, Goodput, JobRecord
from flk_runtime.contract.status import Phase, RankStatus
from flk_runtime.contract.telemetry import (
    HISTORY_LIMIT,
    GpuUsage,
    PodUsage,
    Sample,
    Telemetry,
)
from tests.support.jobs import NOW, JobBuilder

GIB = 1 << 30
START = NOW - 6900
RAISED = Failure(
    Kind.EXCEPTION, 1, 9, "gpt-worker-1", "node-b", 2, NOW - 30, "ValueError", "expected 512 features, got 511",
    'Traceback (most recent call last):\n  File "train.py", line 31\nValueError: expected 512 features, got 511',
)  # fmt: skip
HUNG = Failure(
    Kind.HANG,
    1,
    9,
    "gpt-worker-1",
    "node-b",
    1,
    NOW - 2000,
    message="did not reach all_reduce 812; it waits for data",
    traceback="limit 500s, learned from the steps of the job\n  train.py:31 in load",
)


def record() -> JobRecord:
    """The record of three attempts: the first lost a pod, the second hung, the third failed."""
    lost = Failure(Kind.LOST, 2, None, "gpt-worker-2", "node-c", 0, START + 2400, message="was lost: Evicted")
    history = [
        Attempt(0, START, START + 2400, lost, step=760),
        Attempt(1, START + 2440, START + 4900, HUNG, disruptions=1, step=1480, restored=740, restored_from="memory"),
        Attempt(2, START + 4960, NOW - 30, RAISED, restarts=1, step=1990, restored=1400, restored_from="storage"),
    ]
    seconds = dict(zip(TIME_CAUSES, (5210.0, 90.0, 160.0, 25.0, 310.0, 420.0, 505.0, 100.0, 0.0), strict=True))
    return JobRecord(
        "failed", 100, 3, RAISED, history, 100, 1, 1,
        goodput=Goodput(NOW - 30, {cause: value for cause, value in seconds.items() if value}, 0, 1990),
        started=START, saved=1980, stored=1800,
    )  # fmt: skip


def telemetry(pods: int = 4, processes: int = 8, samples: int = 199) -> Telemetry:
    """Measurements with restarts in the history and one slow rank."""
    history = []
    for number in range(samples):
        step = 10 * (number + 1)
        attempt = 0 if step <= 760 else 1 if step <= 1480 else 2
        loss = 2.2 + 8.0 * math.exp(-step / 400) + 0.15 * math.sin(step / 13)
        slow = 1.0 + (0.6 if attempt == 1 else 0.05)
        seconds = 3.1 + 0.1 * math.sin(step / 31)
        rate = 256 / seconds
        history.append(
            Sample(START + 120 + step * 3.3, attempt, step, seconds, seconds * slow, 9,
                   71.0 * GIB - 1e9 * math.exp(-step / 400), loss=loss, samples_per_s=rate, tokens_per_s=rate * 2048,
                   mfu=0.41, communication=0.18, data_wait=0.02)
        )  # fmt: skip
    ranks = [
        RankStatus(rank, rank // processes, 1990, Phase.TRAINING, 3.1, 0.82 if rank != 9 else 0.99,
                         1.31 if rank == 9 else None, 9 * GIB, 0.02 if rank != 3 else 0.137)
        for rank in range(pods * processes)
    ]  # fmt: skip
    usages = [
        PodUsage(pod, f"gpt-worker-{pod}", f"node-{'abcd'[pod % 4]}", NOW - 40, 11.4, 16, 71 * GIB, 96 * GIB,
                 [GpuUsage(0.93, 61 * GIB, 80 * GIB)] * 2)
        for pod in range(pods)
    ]  # fmt: skip
    settings = {"strategy": "fsdp", "precision": "bfloat16"}
    return Telemetry(NOW - 40, 2, 20_000, history, ranks[:256], usages[:256], settings)


def job(pods: int = 4, processes: int = 8, name: str = "gpt", **annotations: str) -> JobBuilder:
    """The job of the report, with its pods."""
    made = JobBuilder(pods, processes, "96Gi", name)
    spec = f'{{"name":"{name}","command":["train.py","--lr","3e-4"],"replicas":{pods},"resources":{{"gpu":8}}}}'
    made.job["metadata"]["annotations"] = {
        labels.OWNER: "mona@lab",
        labels.VERSION: "0.1.0",
        labels.CODE_HASH: "5f0c1d" * 10,
        labels.COMMIT: "3f2a" * 10 + "-dirty",
        labels.SPEC: spec,
        **annotations,
    }
    made.job["metadata"]["creationTimestamp"] = "2025-12-31T22:05:00Z"
    made.container["env"] = [{"name": "FLK_PROCESSES", "value": str(processes)}, {"name": "SEED", "value": "7"}]
    for index in range(pods):
        made.ended(index, 100, node=f"node-{'abcd'[index % 4]}")
    made.condition("Failed", "it failed")
    made.record = record()
    return made


def report(pods: int = 4, processes: int = 8, name: str = "gpt", **changes: Any) -> Report:
    """The whole report; ``changes`` are fields in the place of those that it has."""
    made = job(pods, processes, name)
    made.event("Evicted", "The node was low on resource: memory.", "Pod", f"{name}-worker-2", "2025-12-31T22:46:00Z")
    view = made.view()
    excerpts = [
        Excerpt(f"The last lines of pod {name}-worker-0", ["[rank 0] step 1990", "[pod 0] attempt 3 failed"]),
    ]
    built = build(
        view,
        made.state(),
        telemetry=telemetry(pods, processes),
        excerpts=excerpts,
    )
    return replace(built, **changes)


def largest() -> Report:
    """The report about a job of 1,000 pods, in which every list and text is as long as it may be."""
    lines = [Excerpt(title, ["x" * LINE] * LINES) for title in ("one", "two")]
    return report(1000, telemetry=telemetry(1000, 8, HISTORY_LIMIT), excerpts=lines)
