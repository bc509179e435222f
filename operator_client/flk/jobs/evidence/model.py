"""KeptJob, KeptCause and StateChange: what is kept of one job, as plain data, and its form as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from flk.kube import Object
from flk.observe.model import Evidence, Finding
from flk_runtime.contract.record import JobRecord

SCHEMA: Final = "flk.dev/evidence/v1"


@dataclass(frozen=True)
class StateChange:
    """A job came into a state. ``time`` is in seconds since the epoch, by the API server's clock."""

    time: float
    phase: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True)
class KeptCause:
    """The cause of a job's state, with its evidence. What it was read from may be gone when somebody asks for it."""

    time: float  # when it was seen last; seconds since the epoch, by the API server's clock
    phase: str  # of the job then
    finding: Finding


@dataclass
class KeptJob:
    """What was seen of one job. Objects are those of the API, without what nobody needs and without secrets."""

    job: Object
    pods: list[Object] = field(default_factory=list)  # as they were seen last, also those that are gone
    replaced_pods: dict[str, Object] = field(default_factory=dict)  # by name: pods that ended and were recreated
    events: list[Object] = field(default_factory=list)  # of the job and its pods, oldest first
    record: JobRecord | None = None  # the launchers' last record
    lines: dict[str, list[str]] = field(default_factory=dict)  # by pod: the last lines of its log, with their tags
    states: list[StateChange] = field(default_factory=list)  # oldest first
    cause: KeptCause | None = None  # of the last state before the deletion; None: nothing was wrong
    updated: float = 0.0  # when flk last saw the job; seconds since the epoch, by the API server's clock
    deleted: float | None = None  # when flk saw that the job was deleted
    place: str = "on this machine"  # where it is kept, for messages; not written

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"])

    @property
    def uid(self) -> str:
        """UID of the job."""
        return str(self.job["metadata"].get("uid", ""))

    def to_json(self) -> str:
        """Return everything as one line of JSON."""
        data = {"schema": SCHEMA, **asdict(self), "record": self.record and asdict(self.record)}
        del data["place"]
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> KeptJob:
        """Return what `to_json` has written. Raises ValueError for anything else."""
        try:
            return cls._from_dict(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the evidence of a job: {error!r}") from None

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> KeptJob:
        return cls(
            job=dict(data["job"]),
            pods=list(data["pods"]),
            replaced_pods=dict(data["replaced_pods"]),
            events=list(data["events"]),
            record=JobRecord.from_dict(data["record"]) if data["record"] else None,
            lines={pod: list(lines) for pod, lines in data["lines"].items()},
            states=[StateChange(**change) for change in data["states"]],
            cause=_cause(data["cause"]) if data["cause"] else None,
            updated=float(data["updated"]),
            deleted=data["deleted"],
        )


def _cause(data: Mapping[str, Any]) -> KeptCause:
    finding = data["finding"]
    evidence = [Evidence(**item) for item in finding["evidence"]]
    return KeptCause(float(data["time"]), data["phase"], Finding(**{**finding, "evidence": evidence}))
