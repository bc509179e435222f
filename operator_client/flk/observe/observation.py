"""Observation: everything that was read of one job until one moment."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Final

from flk.kube import Object
from flk.observe.progress import Progress
from flk.spec.units import timestamp
from flk_runtime.contract.record import ArchivedRecord, JobRecord
from flk_runtime.contract.values import dataclass, field

LOG_LINES: Final = 40  # last lines of a log that are searched for a cause


class What(enum.Enum):
    """What can be read of a job beside its object and its pods. Most values are the fields of Observation for it."""

    EVENTS = "events"
    RECORD = "record"  # the log of pod 0, among whose last lines is the launchers' record
    PEER = "peer"  # the log of the launcher that pod 0 waits for
    METRICS = "metrics"  # the log of the first pod of another worker of strategy diloco
    LOG = "log"
    NODES = "nodes"
    CLAIMS = "claims"
    WORKLOADS = "workloads"
    PENDING_WORKLOADS = "pending_workloads"
    POD_GROUPS = "pod_groups"
    CONTROLLERS = "controllers"


@dataclass(frozen=True)
class Need:
    """One request for more about a job: what to read, and of which object."""

    what: What
    name: str = ""  # of the object, or of the pod; empty: all of them
    kind: str = ""  # of the object that the events are about
    lines: int = 0  # of the log: how many of its last ones
    previous: bool = False  # of the log: the container before the last restart


@dataclass(frozen=True)
class Observation:
    """Everything that was read of one job until one moment.

    Times are in seconds since the epoch, by the API server's clock. Objects are the API's objects, unchanged. A mapping
    without an entry means that the object was not read or does not exist; ``missing`` names the objects that the API
    server does not have, as ``persistentvolumeclaims/data``.
    """

    job: Object | None  # as it was seen last; None: no object of it was seen, only what the launchers have archived
    pods: Sequence[Object] = ()
    time: float = 0.0  # when this was seen
    replaced_pods: Mapping[str, Object] = field(default_factory=dict)  # by name: pods that ended and were recreated
    events: Sequence[Object] = ()  # of the job and its pods, oldest first
    record: JobRecord | None = None  # the launchers' last one
    entry: ArchivedRecord | None = None  # the record that the launchers have archived of a job that has no object
    gone: float | None = None  # when the job was deleted; None if it exists
    name_reused: bool = False  # another job has the name now
    # Read only where a pod or the job is in trouble:
    nodes: Mapping[str, Object] = field(default_factory=dict)  # by name
    claims: Mapping[str, Object] = field(default_factory=dict)  # PersistentVolumeClaims by name
    workloads: Sequence[Object] = ()  # Kueue's Workloads that the job owns
    pending_workloads: Sequence[Object] = ()  # all that wait in the job's queue, in Kueue's order
    pod_groups: Sequence[Object] = ()  # of a scheduler of gangs, with the job's name
    controllers: Mapping[str, Sequence[Object]] = field(default_factory=dict)  # their Deployments, by name of the check
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # last lines of pods, by pod name
    log_times: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of these lines, where they are known
    progress: Sequence[Progress] = ()  # of the ranks that print metrics
    missing: frozenset[str] = frozenset()
    unreadable: frozenset[str] = frozenset()  # kinds that the user may not read: "nodes"
    not_served: Mapping[str, str] = field(default_factory=dict)  # by kind: that the cluster does not serve it
    other_versions: Mapping[str, str] = field(default_factory=dict)  # by kind: that it serves it in others than flk's
    answered: frozenset[Need] = frozenset()  # the requests that were made for this observation
    unread: Mapping[Need, str] = field(default_factory=dict)  # those of them that failed, with the error

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"] if self.job else self.entry.job if self.entry else "")

    @property
    def uid(self) -> str:
        """UID of the job; empty if it is not known."""
        return str(self.job["metadata"].get("uid", "") if self.job else self.entry.uid if self.entry else "")

    @property
    def kept_by_finalizers(self) -> str:
        """What follows "it is being deleted": the finalizers that keep a job without pods; empty if there are none."""
        finalizers = (self.job or {}).get("metadata", {}).get("finalizers") or []
        named = ", ".join(str(name) for name in finalizers if name != "foregroundDeletion")
        return f", and finalizers keep it: {named}" if named and not self.pods else ""

    def has_read(self, what: What, name: str = "") -> bool:
        """Return whether this was asked for and answered. If not, nothing follows from what is not there."""
        made = [need for need in self.answered if (need.what, need.name) == (what, name)]
        return any(need not in self.unread for need in made)

    def lines_of(self, pod: str) -> list[tuple[str, str]]:
        """Return time and text of the last lines of a pod; the times are empty where they are not known."""
        lines, times = self.logs.get(pod, ()), self.log_times.get(pod, ())
        return [*zip(times if len(times) == len(lines) else [""] * len(lines), lines, strict=True)]


def unnamed_pod(index: int) -> str:
    """Return a placeholder for the name of a pod of a job without an object, from which the name would follow."""
    return f"pod {index}"


def involved(event: Object) -> Object:
    """Return what an event says of the object that it is about: kind, name, namespace and UID."""
    return event.get("involvedObject") or {}


def event_time(event: Object, *, first: bool = False) -> float:
    """Return when an event happened last (or first), in seconds since the epoch; 0 if it does not say."""
    keys = ("firstTimestamp", "eventTime", "lastTimestamp") if first else ("lastTimestamp", "eventTime")
    return next(filter(None, (timestamp(event.get(key)) for key in keys)), 0.0)
