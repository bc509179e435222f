"""Observation: what the objects, events and records of a job say, read once for `derive` and `failure`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from flk import labels
from flk.jobs.state.model import PodPhase, PodState
from flk.jobs.state.pods import existing_pod, memory_limit, missing_pod, was_killed_by_memory_limit
from flk.kube import Object
from flk.units import timestamp
from flk_runtime.contract import CONTAINER, JobRecord

_ROLES: Final = ("Master", "Worker")  # in the order of the pods' indexes
_CLOCK_SKEW: Final = 5.0  # seconds by which the clocks of nodes may differ


class Observation:
    """A job, its pods, their events and the launchers' records at one moment."""

    def __init__(
        self,
        job: Object,
        pods: Sequence[Object],
        events: Sequence[Object],
        record: JobRecord | None,
        replaced_pods: Mapping[str, Object],
    ) -> None:
        self.job, self.events, self.replaced_pods, self._objects = job, events, replaced_pods, pods
        spec = job.get("spec") or {}
        status = job.get("status") or {}
        self.run_policy: Object = spec.get("runPolicy") or {}
        specs = spec.get("pytorchReplicaSpecs") or {}
        self.replica_specs = {role: specs[role] for role in _ROLES if specs.get(role) is not None}
        count = str(spec.get("nprocPerNode") or "1")
        self.processes = int(count) if count.isdigit() else 1
        self.conditions = {c["type"]: c for c in status.get("conditions") or [] if c.get("status") == "True"}
        self.seen_by_operator = bool(status.get("conditions"))
        self.pods = self._pods()
        self.records = [*(pod.record for pod in self.pods if pod.record), *([record] if record else [])]
        self.completed = timestamp(status.get("completionTime")) or None

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
    def began(self) -> bool:
        """Whether an attempt has run before."""
        recreated = any(pod.restarts for pod in self.pods) or bool(self.replaced_pods)
        return recreated or "Restarting" in self.conditions or bool(self.record and self.record.attempts)

    @cached_property
    def job_events(self) -> list[Object]:
        """The events about the job itself."""
        return [event for event in self.events if _involved(event, "kind") != "Pod"]

    @property
    def image(self) -> str:
        """The image of the training container."""
        for spec in self.replica_specs.values():
            for container in ((spec.get("template") or {}).get("spec") or {}).get("containers") or []:
                if container.get("name") == CONTAINER:
                    return str(container.get("image") or "")
        return ""

    def killed_by_memory_limit(self, pod_name: str, since: float) -> bool:
        """Return whether the container of a pod was killed at its memory limit after ``since``."""
        pods = [p for p in [*self._objects, *self.replaced_pods.values()] if p["metadata"]["name"] == pod_name]
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
        limits = [memory_limit(pod) for pod in self._objects if pod["metadata"]["name"] == pod_name]
        return next(filter(None, limits), "")

    def _pods(self) -> list[PodState]:
        """Return the states of all pods that the job should have, in the order of their indexes."""
        found = {}
        for pod in self._objects:
            pod_labels = pod["metadata"].get("labels") or {}
            found[pod_labels.get(labels.REPLICA_TYPE, "worker"), pod_labels.get(labels.REPLICA_INDEX, "0")] = pod
        states: list[PodState] = []
        job_name = self.job["metadata"]["name"]
        for role, spec in self.replica_specs.items():
            restart_policy = str(spec.get("restartPolicy") or "")
            for number in range(int(spec.get("replicas") or 1)):
                index = len(states)
                ranks = list(range(index * self.processes, (index + 1) * self.processes))
                there = found.get((role.lower(), str(number)))
                if there is None:
                    states.append(missing_pod(index, f"{job_name}-{role.lower()}-{number}", ranks, self.job_events))
                else:
                    events = self._pod_events(there["metadata"]["name"])
                    states.append(existing_pod(there, index, ranks, restart_policy=restart_policy, events=events))
        return states

    def _pod_events(self, name: str) -> list[Object]:
        return [e for e in self.events if _involved(e, "kind") == "Pod" and _involved(e, "name") == name]


def _involved(event: Object, key: str) -> Any:
    return (event.get("involvedObject") or {}).get(key)
