"""PyTorchJob: the target of Kubeflow's training operator 1, with workers only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from flk.spec import labels, names
from flk.targets.model import (
    EXIT_CODE,
    MOST_PROCESSES,
    WORKER,
    Controller,
    Object,
    Parts,
    Replicas,
    Target,
    count,
    ttl_fields,
)

_ROLES: Final = ("Master", WORKER)  # in the order of the pods' indexes
_DEFAULT_POLICY: Final = "OnFailure"  # the restart policy by which the operator treats a job without one
_LARGEST_INT: Final = 2**31 - 1
_OPERATOR: Final = Controller(
    "operator",
    "the training operator",
    "control-plane=kubeflow-training-operator",
    "install Kubeflow's training operator: k8s/install-operator in flk's repository, or its own manifests; "
    "or use --target auto, which takes what the cluster serves",
)


class PyTorchJob(Target):
    """A PyTorchJob without a Master. The operator brings pods back by its restart policy ``ExitCode``."""

    name = "pytorchjob"
    kind = "PyTorchJob"
    group = labels.KUBEFLOW_GROUP
    version = "v1"
    plural = "pytorchjobs"
    port_name = "pytorchjob-port"  # the operator looks for it, and makes one of port 23456 otherwise
    job_label = labels.OPERATOR_JOB_NAME  # which pods of jobs without flk have too
    index_field = f"metadata.labels['{labels.REPLICA_INDEX}']"
    suspend_path = "spec.runPolicy.suspend"
    selector = ""
    controller = _OPERATOR.name
    controllers = (_OPERATOR,)
    controller_pods = "get pods -A -l control-plane=kubeflow-training-operator"
    scalable = True
    keeps_ended = False

    def render(self, parts: Parts) -> list[Object]:
        """Return the PyTorchJob."""
        job = parts.job
        worker = {"replicas": job.created_pods, "restartPolicy": EXIT_CODE, "template": parts.template}
        policy: Object = {
            "cleanPodPolicy": "None",
            # flk counts the attempts. The operator's own count must not end a job earlier; with zero it would, at
            # the first pod that it recreates.
            "backoffLimit": min(_LARGEST_INT, (job.restarts + job.disruptions + 1) * job.most_pods),
            **({"activeDeadlineSeconds": job.deadline} if job.deadline is not None else {}),
            # The operator applies it to jobs that have succeeded only: it never says when one has failed.
            **ttl_fields(job),
            **({"suspend": True} if job.queue else {}),  # Kueue starts it
        }
        least = job.elastic.min if job.elastic else job.created_pods
        manifest = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": parts.metadata,
            "spec": {
                "nprocPerNode": str(job.processes_per_pod),
                "runPolicy": policy,
                # With this policy a job has succeeded when one pod has. Without it the operator would wait for pods
                # that are not needed: one that never got a node, or was created anew at the end.
                **(
                    {"elasticPolicy": {"minReplicas": least, "maxReplicas": job.most_pods}}
                    if job.elastic or job.spares
                    else {}
                ),
                "pytorchReplicaSpecs": {WORKER: worker},
            },
        }
        return [manifest]

    def pod_host(self, job: str, pod: int | str) -> str:
        """Return the name of the Service that the operator makes for a pod."""
        return self.pod_name(job, WORKER, pod)

    def replicas(self, job: Object) -> Mapping[str, Replicas]:
        """Return the pods of the Master, if there is one, and of the workers."""
        specs = (job.get("spec") or {}).get("pytorchReplicaSpecs") or {}
        return {
            role: Replicas(
                count(job, f"replicas of {role}", 1 if (given := specs[role].get("replicas")) is None else given),
                specs[role].get("template") or {},
                str(specs[role].get("restartPolicy") or _DEFAULT_POLICY),
            )
            for role in _ROLES
            if specs.get(role) is not None
        }

    def pod_name(self, job: str, role: str, number: int | str) -> str:
        """Return the name of a pod, which is the name of its Service too."""
        return f"{job}-{role.lower()}-{number}" if role != WORKER else names.pod_name(self.name, job, number)

    def position(self, pod: Object) -> tuple[str, int]:
        """Return the role and the number that the operator's labels give."""
        found = labels.of(pod)
        number = str(found.get(labels.REPLICA_INDEX, "0"))
        role = str(found.get(labels.REPLICA_TYPE, "worker")).capitalize()
        return role, int(number) if number.isdecimal() and number.isascii() else 0

    def processes(self, job: Object) -> int:
        """Return ``nprocPerNode`` if it is a number, else 1."""
        told = str((job.get("spec") or {}).get("nprocPerNode") or "1")
        return count(job, "nprocPerNode", told, MOST_PROCESSES) if told.isdigit() else 1

    def is_seen(self, job: Object) -> bool:
        """Return whether the operator has set a condition."""
        return bool((job.get("status") or {}).get("conditions"))

    def suspended(self, job: Object) -> bool:
        """Return ``spec.runPolicy.suspend``."""
        return bool(((job.get("spec") or {}).get("runPolicy") or {}).get("suspend"))

    def suspension(self, suspended: bool) -> Object:
        """Return the patch of ``spec.runPolicy.suspend``."""
        return {"spec": {"runPolicy": {"suspend": suspended}}}

    def start_mark(self, job: Object, moment: str) -> Object:
        """Return the annotation from which the pods of a job of flk read it."""
        mark = {"template": {"metadata": {"annotations": {labels.STARTED: moment}}}}
        roles = [role for role, replicas in self.replicas(job).items() if labels.STARTED in str(replicas.template)]
        return {"spec": {"pytorchReplicaSpecs": dict.fromkeys(roles, mark)}} if roles else {}

    def scaling(self, job: Object, replicas: int) -> Object:
        """Return the patch of the number of workers. The operator deletes the highest indexes, or adds pods."""
        return {"spec": {"pytorchReplicaSpecs": {WORKER: {"replicas": replicas}}}}
