"""PyTorchJobs with their pods and events, as the API server has them, for tests of status and diagnosis."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from flk.jobs import state as states
from flk.jobs.state import State
from flk.observe.observation import Need, Observation, What
from flk.observe.view import JobView
from flk_runtime.contract import ExitCode
from flk_runtime.contract.failure import Failure
from flk_runtime.contract.record import Attempt, JobRecord
from flk_runtime.launcher.coordinator.policy import decide
from flk_runtime.launcher.records.history import new_record
from flk_runtime.launcher.settings import Limits
from tests.support.api_server import FakeApiServer

MADE = "2026-01-01T00:00:00Z"
NOW = 1767225600.0 + 60  # a minute after everything was made


class JobBuilder:
    """A PyTorchJob of some workers, its pods, and the events about them. Methods return the builder.

    It copies the states and conditions that it is given, so that a test may change its pods.
    """

    def __init__(self, replicas: int = 3, processes: int = 1, memory: str = "", name: str = "gpt") -> None:
        self.name = name
        self.replicas = replicas
        limits = {"resources": {"limits": {"memory": memory}}} if memory else {}
        self.container: dict[str, Any] = {"name": "pytorch", "image": "img", **limits}
        worker = {
            "replicas": replicas,
            "restartPolicy": "ExitCode",
            "template": {"spec": {"containers": [self.container]}},
        }
        self.job: dict[str, Any] = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": {
                "name": name,
                "namespace": "team",
                "uid": f"uid-{name}",
                "creationTimestamp": MADE,
                "labels": {"flk.dev/job": name},
            },
            "spec": {"nprocPerNode": str(processes), "runPolicy": {}, "pytorchReplicaSpecs": {"Worker": worker}},
            "status": {},
        }
        self.condition("Created")
        self.pods: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.record: JobRecord | None = None
        self.replaced_pods: dict[str, Any] = {}

    def condition(self, kind: str, message: str = "", reason: str = "", status: str = "True") -> JobBuilder:
        conditions = self.job["status"].setdefault("conditions", [])
        conditions.append({"type": kind, "status": status, "message": message, "reason": reason})
        return self

    def pod(
        self, index: int, phase: str = "Running", state: Any = None, node: str = "node-a", **status: Any
    ) -> JobBuilder:
        labels = {
            "training.kubeflow.org/job-name": self.name,
            "training.kubeflow.org/replica-index": str(index),
            "training.kubeflow.org/replica-type": "worker",
        }
        owner = {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "name": self.name,
            "uid": self.job["metadata"]["uid"],
            "controller": True,
        }
        default = {"running": {"startedAt": MADE}} if phase == "Running" else {}
        container = {"name": "pytorch", "restartCount": 0, "state": default if state is None else deepcopy(state)}
        self.pods[index] = {
            "metadata": {
                "name": f"{self.name}-worker-{index}",
                "uid": f"pod-{index}",
                "creationTimestamp": MADE,
                "labels": labels,
                "ownerReferences": [owner],
            },
            "spec": {"containers": [self.container], "restartPolicy": "Never", **({"nodeName": node} if node else {})},
            "status": {"phase": phase, "containerStatuses": [container], **deepcopy(status)},
        }
        return self

    def ended(
        self, index: int, code: int, message: str = "", reason: str = "", at: int = 30, **status: Any
    ) -> JobBuilder:
        word = reason or ("Completed" if code == 0 else "Error")
        end = {"exitCode": code, "reason": word, "finishedAt": f"2026-01-01T00:00:{at:02}Z", "startedAt": MADE}
        phase = "Succeeded" if code == 0 else "Failed"
        return self.pod(index, phase, {"terminated": end | ({"message": message} if message else {})}, **status)

    def all(self, what: str, *args: Any, **how: Any) -> JobBuilder:
        for index in range(self.replicas):
            getattr(self, what)(index, *args, **how)
        return self

    def event(
        self,
        reason: str,
        message: str,
        kind: str = "PyTorchJob",
        name: str = "",
        at: str = MADE,
        count: int = 1,
        uid: str = "",
    ) -> JobBuilder:
        involved = {"kind": kind, "name": name or self.name, **({"uid": uid} if uid else {})}
        event = {"type": "Warning", "reason": reason, "message": message, "involvedObject": involved}
        self.events.append(event | {"lastTimestamp": at, "count": count})
        return self

    def state(self, **around: Any) -> State:
        return states.derive(self.view(**around))

    def seen(self, **around: Any) -> Observation:
        """The observation of the job, with the objects around it."""
        pods = list(self.pods.values())
        read = [Need(What.EVENTS, f"{self.name}-worker-{index}", "Pod") for index in range(self.replicas)]
        own = {"events": self.events, "record": self.record, "replaced_pods": self.replaced_pods}
        around = {"answered": frozenset(read), **around}
        return Observation(self.job, pods, NOW, **own, **around)

    def in_queue(self) -> JobBuilder:
        self.job["spec"]["runPolicy"]["suspend"] = True
        self.job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gold"
        return self

    def view(self, **around: Any) -> JobView:
        """The view of the job, with the objects around it."""
        return JobView(self.seen(**around))

    def ran(self, index: int, *uids: str, until: str = "") -> JobBuilder:
        """Add the events of pods of one name that ran; ``until`` is the reason of the event that ended them."""
        name = f"{self.name}-worker-{index}"
        for uid in uids:
            self.event("Started", "Started container pytorch", "Pod", name, uid=uid)
            if until:
                self.event(until, "Stopping container pytorch", "Pod", name, uid=uid)
        return self

    def add_to(self, server: FakeApiServer) -> JobBuilder:
        """Put the job, its pods, their nodes and its events into a fake API server."""
        server.add("pytorchjobs", self.job)
        for pod in self.pods.values():
            server.add("pods", pod)
        for name in {pod["spec"].get("nodeName") for pod in self.pods.values()} - {None}:
            server.documents[f"/api/v1/nodes/{name}"] = {"metadata": {"name": name}}
        for number, event in enumerate(self.events):
            server.add("events", {"metadata": {"name": f"{self.name}.{number}"}, **event})
        return self


def record(failure: Failure | None, *attempts: Failure | None, outcome: str = "") -> JobRecord:
    """The record of a job that has ended, whose attempts ended with these failures (None: without one)."""
    limits = Limits(restarts=3)
    history: list[Attempt] = []
    for n, f in enumerate(attempts or (failure,)):
        used = decide(history, limits)
        end = NOW - 40 + n if f else None
        history.append(Attempt(n, NOW - 50 + n, end, f, used.restarts, used.disruptions))
    code = failure.code if failure else ExitCode.DONE
    return new_record(outcome or ("failed" if failure else "succeeded"), int(code), failure, history, limits)
