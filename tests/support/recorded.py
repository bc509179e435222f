"""Observations of jobs as files: recorded from a real cluster, and read by tests that have none."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flk.observe.observation import Observation
from flk.observe.view import JobView
from flk_runtime.contract import foreign
from flk_runtime.contract.record import JobRecord

_NOISE = (
    "managedFields",
    "images",
    "nodeInfo",
    "daemonEndpoints",
    "addresses",
    "kubectl.kubernetes.io/last-applied-configuration",
    "flk.dev/spec",
    "ownerReferences",
    "tolerations",
    "volumeMounts",
    "securityContext",
    "imageID",
    "containerID",
    "selector",
    "reportingComponent",
    "reportingInstance",
    "source",
)
AROUND = (
    "not_served",
    "other_versions",
    "nodes",
    "claims",
    "workloads",
    "pod_groups",
    "controllers",
    "logs",
    "progress",
    "missing",
    "unreadable",
)
FOLDER = Path(__file__).parents[1] / "unit" / "flk" / "health" / "causes"


def save(view: JobView, path: Path) -> None:
    """Write the observation that a view was made of."""
    seen = view.seen
    around = {name: getattr(seen, name) for name in AROUND}
    lists = {name: sorted(value) for name, value in around.items() if isinstance(value, frozenset)}
    data = {
        "job": seen.job,
        "pods": seen.pods,
        "events": seen.events,
        "record": asdict(seen.record) if seen.record else None,
        "now": seen.time,
        "surroundings": {**around, **lists},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_without_noise(data), indent=1, sort_keys=True) + "\n")


def load(path: Path) -> JobView:
    """Return the view that `save` has written."""
    data = json.loads(path.read_text())
    around = data["surroundings"]
    for key in ("missing", "unreadable"):
        around[key] = frozenset(around[key])
    record = foreign.read(JobRecord, data["record"]) if data["record"] else None
    seen = Observation(data["job"], data["pods"], data["now"], events=data["events"], record=record, **around)
    return JobView(seen)


def _without_noise(value: Any) -> Any:
    """Leave out long data that no cause reads: managed fields, images of nodes, the shipped job."""
    if isinstance(value, list):
        return [_without_noise(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_noise(item) for key, item in value.items() if key not in _NOISE}
    return value
