"""Picture: the objects of a job, read once, with what flk derives from each of them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from flk import labels
from flk.diagnose.model import PodPhase, PodState
from flk.diagnose.pods import existing_pod, memory_limit, missing_pod, was_killed_by_memory_limit
from flk.diagnose.progress import Progress
from flk.kube import Object
from flk.terminal import program_name
from flk.units import timestamp
from flk_runtime.contract import CONTAINER, JOB, JobRecord

_ROLES: Final = ("Master", "Worker")  # in the order of the pods' indexes
_CLOCK_SKEW: Final = 5.0  # seconds by which the clocks of nodes may differ
_POD_NAME: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?")


@dataclass(frozen=True)
class Surroundings:
    """The objects around a job that explain why it does not go on. Read only where a pod or the job is in trouble.

    A mapping without an entry means that the object was not read or does not exist; ``missing`` names those that the
    API server does not have, as ``PersistentVolumeClaim data``.
    """

    nodes: Mapping[str, Object] = field(default_factory=dict)  # by name
    claims: Mapping[str, Object] = field(default_factory=dict)  # PersistentVolumeClaims by name
    workloads: Sequence[Object] = ()  # Kueue's Workloads that the job owns
    pod_groups: Sequence[Object] = ()  # of Volcano or the scheduler plugins, with the job's name
    quotas: Sequence[Object] = ()  # ResourceQuotas of the namespace
    limit_ranges: Sequence[Object] = ()  # LimitRanges of the namespace
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)  # last lines of pods, by pod name
    progress: Sequence[Progress] = ()  # of the ranks that print metrics
    missing: frozenset[str] = frozenset()
    unreadable: frozenset[str] = frozenset()  # what the user may not read: "nodes"


class Picture:
    """A job, its pods, their events, the launchers' records and the objects around them at one moment."""

    gone: float | None = None  # when the job was deleted, if this is what was kept of one

    def __init__(
        self,
        job: Object,
        pods: Sequence[Object],
        *,
        now: float,
        events: Sequence[Object] = (),
        record: JobRecord | None = None,
        replaced_pods: Mapping[str, Object] | None = None,
        surroundings: Surroundings | None = None,
        context: str | None = None,
    ) -> None:
        """``events`` are those of the job and of its pods, oldest first. ``record`` is the last one in pod 0's log.

        ``replaced_pods`` are pods that ended and were recreated, by name. ``now`` is in seconds since the epoch by the
        API server's clock. ``context`` is what the user gave with --context, for the commands that are suggested.
        """
        self.job, self.events, self.now, self.context = job, events, now, context
        self.replaced_pods = replaced_pods or {}
        self.around = surroundings or Surroundings()
        self.objects = {pod["metadata"]["name"]: pod for pod in pods}
        spec = job.get("spec") or {}
        self.status: Object = job.get("status") or {}
        self.run_policy: Object = spec.get("runPolicy") or {}
        specs = spec.get("pytorchReplicaSpecs") or {}
        self.replica_specs: dict[str, Object] = {r: specs[r] for r in _ROLES if specs.get(r) is not None}
        count = str(spec.get("nprocPerNode") or "1")
        self.processes = int(count) if count.isdigit() else 1
        self.conditions = {c["type"]: c for c in self.status.get("conditions") or [] if c.get("status") == "True"}
        self.seen_by_operator = bool(self.status.get("conditions")) or bool(self.job_events)
        self.pods = self._pods()
        self.records = [*(pod.record for pod in self.pods if pod.record), *([record] if record else [])]
        self.completed = timestamp(self.status.get("completionTime")) or None

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self.job["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Namespace of the job."""
        return str(self.job["metadata"].get("namespace") or "")

    @property
    def created(self) -> float:
        """When the job was created, in seconds since the epoch."""
        return timestamp(self.job["metadata"].get("creationTimestamp"))

    @property
    def labels(self) -> Object:
        """Labels of the job."""
        return self.job["metadata"].get("labels") or {}

    @property
    def annotations(self) -> Object:
        """Annotations of the job."""
        return self.job["metadata"].get("annotations") or {}

    @property
    def from_flk(self) -> bool:
        """Whether flk's launcher starts the ranks: the manifest is flk's."""
        environment = {variable.get("name") for variable in self.container.get("env") or []}
        return labels.JOB in self.labels or JOB in environment

    @property
    def record(self) -> JobRecord | None:
        """The record that knows of most attempts, and among these one that knows the end."""
        return max(
            self.records,
            key=lambda r: (r.attempts[-1].number if r.attempts else -1, r.outcome in ("failed", "succeeded")),
            default=None,
        )

    @property
    def ended(self) -> float | None:
        """When the last pod ended, or when the operator says that the job did."""
        return max((pod.ended for pod in self.pods if pod.ended), default=None) or self.completed

    @property
    def failed(self) -> bool:
        """Whether the job has failed: its operator, a pod or a launcher's record says so."""
        if "Succeeded" in self.conditions:
            return False  # a worker may fail after its Master has succeeded
        return (
            "Failed" in self.conditions
            or any(pod.failed_permanently for pod in self.pods)
            or any(record.outcome == "failed" for record in self.records)
        )

    @property
    def succeeded(self) -> bool:
        """Whether the job has succeeded: its operator says so, or all its workers have."""
        if "Succeeded" in self.conditions:
            return True
        all_succeeded = bool(self.pods) and all(pod.phase == PodPhase.SUCCEEDED for pod in self.pods)
        return all_succeeded and "Master" not in self.replica_specs

    @property
    def suspended(self) -> bool:
        """Whether the job is suspended, by its user or until a queue admits it."""
        return bool(self.run_policy.get("suspend"))

    @property
    def queue(self) -> str:
        """The queue that the job is submitted to; empty if there is none."""
        scheduling = self.run_policy.get("schedulingPolicy") or {}
        return str(self.labels.get(labels.QUEUE) or scheduling.get("queue") or "")

    @property
    def began(self) -> bool:
        """Whether an attempt has run before."""
        recreated = any(pod.restarts for pod in self.pods) or bool(self.replaced_pods)
        return recreated or "Restarting" in self.conditions or bool(self.record and self.record.attempts)

    @cached_property
    def job_events(self) -> list[Object]:
        """The events about the job itself."""
        return [event for event in self.events if _involved(event, "kind") in (None, "PyTorchJob")]

    @cached_property
    def pod_events(self) -> Mapping[str, list[Object]]:
        """The events about each pod, by the pod's name."""
        found: dict[str, list[Object]] = defaultdict(list)
        for event in self.events:
            if _involved(event, "kind") == "Pod":
                found[str(_involved(event, "name"))].append(event)
        return found

    @property
    def image(self) -> str:
        """The image of the training container."""
        return str(self.container.get("image") or "")

    @cached_property
    def container(self) -> Object:
        """The training container in the job's template; empty if there is none."""
        for spec in self.replica_specs.values():
            for container in pod_spec(spec.get("template")).get("containers") or []:
                if container.get("name") == CONTAINER:
                    return dict(container)
        return {}

    def flk(self, verb: str, *, job: str | None = None) -> str:
        """Return a command of flk about this job, or about another one."""
        words = [program_name(), verb, self.name if job is None else job, "-n", self.namespace]
        return " ".join(filter(None, words + (["--context", self.context] if self.context else [])))

    def kubectl(self, words: str) -> str:
        """Return a command of kubectl in the job's namespace."""
        context = f"--context {self.context} " if self.context else ""
        return f"kubectl {context}-n {self.namespace} {words}"

    def killed_by_memory_limit(self, pod_name: str, since: float) -> bool:
        """Return whether the container of a pod was killed at its memory limit after ``since``."""
        pods = filter(None, (self.objects.get(pod_name), self.replaced_pods.get(pod_name)))
        if any(was_killed_by_memory_limit(pod) for pod in pods):
            return True
        # The operator deletes such a pod at once. Only its event remains.
        return any(
            event.get("reason") == "OOMKilled"
            and str(event.get("message", "")).startswith(f"Error pod {pod_name} ")
            and timestamp(event.get("lastTimestamp")) >= since - _CLOCK_SKEW
            for event in self.job_events
        )

    def memory_limit(self, pod_name: str) -> str:
        """Return the memory limit of a pod's training container; empty if it is not known."""
        pod = self.objects.get(pod_name)
        return memory_limit(pod) if pod else ""

    def _pods(self) -> list[PodState]:
        """Return the states of all pods that the job should have, in the order of their indexes."""
        found = {}
        for pod in self.objects.values():
            pod_labels = pod["metadata"].get("labels") or {}
            found[pod_labels.get(labels.REPLICA_TYPE, "worker"), pod_labels.get(labels.REPLICA_INDEX, "0")] = pod
        refused = self._refused_pods()
        states: list[PodState] = []
        for role, spec in self.replica_specs.items():
            restart_policy = str(spec.get("restartPolicy") or "")
            for number in range(int(spec.get("replicas") or 1)):
                index = len(states)
                ranks = list(range(index * self.processes, (index + 1) * self.processes))
                there = found.get((role.lower(), str(number)))
                if there is None:
                    name = f"{self.name}-{role.lower()}-{number}"
                    states.append(missing_pod(index, name, ranks, refused.get(name)))
                else:
                    events = self.pod_events.get(there["metadata"]["name"], [])
                    states.append(existing_pod(there, index, ranks, restart_policy=restart_policy, events=events))
        return states

    def _refused_pods(self) -> dict[str, Object]:
        """Return the last event that says why a pod was not created, by the pod's name."""
        refused = {}
        for event in self.job_events:
            if str(event.get("reason", "")).startswith("FailedCreate"):
                refused.update(dict.fromkeys(_POD_NAME.findall(str(event.get("message", ""))), event))
        return refused


def pod_spec(template: Any) -> Object:
    """Return the spec of a pod or of a pod template; empty if it has none."""
    return (template or {}).get("spec") or {}


def event_time(event: Object, *, first: bool = False) -> float:
    """Return when an event happened last (or first), in seconds since the epoch; 0 if it does not say."""
    keys = ("firstTimestamp", "eventTime", "lastTimestamp") if first else ("lastTimestamp", "eventTime")
    return next(filter(None, (timestamp(event.get(key)) for key in keys)), 0.0)


def _involved(event: Object, key: str) -> Any:
    return (event.get("involvedObject") or {}).get(key)
