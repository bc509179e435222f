"""The form in which an observation is archived: one line of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from flk.observe.model import Evidence, Finding
from flk.observe.observation import FoundCause, Observation, StateChange
from flk.observe.progress import Progress
from flk_runtime.contract import foreign, typed
from flk_runtime.contract.record import JobRecord

SCHEMA: Final = "flk.dev/evidence/v1"


def to_json(seen: Observation) -> str:
    """Return the archived part of an observation as one line of JSON."""
    data = {
        "schema": SCHEMA,
        "job": seen.job,
        "pods": seen.pods,
        "replaced_pods": seen.replaced_pods,
        "events": seen.events,
        "record": seen.record and asdict(seen.record),
        "lines": seen.logs,
        "line_times": seen.log_times,
        "states": [asdict(change) for change in seen.states],
        "cause": seen.cause and asdict(seen.cause),
        "progress": [asdict(progress) for progress in seen.progress],
        "seen_by": seen.seen_by,
        "diff": seen.diff,
        "updated": seen.time,
        "deleted": seen.gone,
    }
    return json.dumps(data, separators=(",", ":"))


def from_json(text: str | bytes) -> Observation:
    """Return the observation that `to_json` has written. Raises ValueError for anything else."""
    try:
        return _from_dict(json.loads(text))
    except foreign.ERRORS as error:
        raise ValueError(f"not an archived job: {error!r}") from None


def _from_dict(data: Mapping[str, Any]) -> Observation:
    return Observation(
        job=dict(data["job"]),
        pods=list(data["pods"]),
        time=float(data["updated"]),
        replaced_pods=dict(data["replaced_pods"]),
        events=list(data["events"]),
        record=typed.read(JobRecord, data["record"]) if data["record"] else None,
        gone=data["deleted"],
        logs={pod: list(lines) for pod, lines in data["lines"].items()},
        log_times={pod: list(times) for pod, times in data.get("line_times", {}).items()},
        states=[StateChange(**change) for change in data["states"]],
        cause=_cause(data["cause"]) if data["cause"] else None,
        progress=[Progress(**each) for each in data.get("progress", ())],  # earlier versions wrote none of these
        seen_by=str(data.get("seen_by", "")),
        diff=str(data.get("diff", "")),
    )


def _cause(data: Mapping[str, Any]) -> FoundCause:
    finding = data["finding"]
    evidence = [Evidence(**item) for item in finding["evidence"]]
    return FoundCause(float(data["time"]), data["phase"], Finding(**{**finding, "evidence": evidence}))
