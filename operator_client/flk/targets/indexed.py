"""The targets whose pods belong to an indexed Job of Kubernetes: the Job itself, and the JobSet.

The launchers start the ranks again while their pods run. The Job has to recreate pods that were lost, and must not
recreate pods whose end is final: its pod failure policy says so. The Job of an elastic job, and of one with spares,
succeeds with its first pod (``successPolicy``): `kubectl create` of a rendered Job, which refuses unknown fields, needs
Kubernetes 1.30 or newer then.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from flk.spec import labels, names
from flk.targets.model import (
    EXIT_CODE,
    REPLACED,
    WORKER,
    Controller,
    Object,
    Parts,
    Replicas,
    Target,
    count,
    is_controlled,
    ttl_fields,
)

if TYPE_CHECKING:
    from flk.spec.job import Job as JobSpec

COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
FINAL_CODES: Final = list(range(1, 128))  # exit codes after which a pod is not started again
_NAME_LIMIT: Final = 57  # characters of a pod's name before the random ones
_LARGEST_INT: Final = 2**31 - 1
REPLICATED_JOB: Final = "worker"  # of a JobSet
# Labels that the API server adds to the template of a Job, by which it finds the Job's pods.
_ADDED: Final = (
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "controller-uid",
    "job-name",
)
JOBSET_CONTROLLER: Final = Controller(
    "jobset controller",
    "the JobSet controller",
    "app.kubernetes.io/name=jobset",
    "install JobSet with its own manifests, or use --target job, which needs no controller",
)


class IndexedTarget(Target):
    """A target whose pods an indexed Job creates.

    The names of the pods end with random characters. Pods that come back have new names, beside those that have ended.
    """

    index_field = f"metadata.annotations['{COMPLETION_INDEX}']"

    def pod_name(self, job: str, role: str, number: int | str) -> str:
        """Return the host name of a pod, with which its name begins."""
        return names.pod_name(self.name, job, number)

    def base_name(self, pod: str) -> str:
        """Return the name without its last part, five random characters."""
        return pod.rpartition("-")[0]

    def is_named(self, pod: Object, job: str) -> bool:
        """Return whether a pod has the name of its index, in which a long name of the Job is cut."""
        role, index = self.position(pod)
        name, end = self.pod_name(job, role, index), f"-{index}"
        whole = name if len(name) <= _NAME_LIMIT else name[: _NAME_LIMIT - len(end)] + end
        return self.base_name(pod["metadata"]["name"]) == whole

    def pod_host(self, job: str, pod: int | str) -> str:
        """Return the name of a pod in the domain of the job's headless Service."""
        return f"{self.pod_name(job, WORKER, pod)}.{job}"

    def position(self, pod: Object) -> tuple[str, int]:
        """Return the index of the pod in its Job."""
        meta = pod["metadata"]
        number = (meta.get("annotations") or {}).get(COMPLETION_INDEX)
        number = str(number if number is not None else (meta.get("labels") or {}).get(COMPLETION_INDEX, "0"))
        return WORKER, int(number) if number.isdecimal() and number.isascii() else 0


class IndexedJob(IndexedTarget):
    """An indexed Job, with a headless Service for the names of its pods."""

    name = "job"
    kind = "Job"
    group = "batch"
    version = "v1"
    plural = "jobs"
    success_conditions = ("Complete", "SuccessCriteriaMet")
    controller = "Kubernetes' Job controller"
    controller_pods = "get pods -n kube-system -l component=kube-controller-manager"
    scalable = True

    def render(self, parts: Parts) -> list[Object]:
        """Return the Job and its Service."""
        job, template = parts.job, copy.deepcopy(parts.template)
        template["spec"].setdefault("subdomain", job.name)
        manifest: Object = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": parts.metadata,
            "spec": {
                **({"suspend": True} if job.queue else {}),  # Kueue starts it
                **ttl_fields(job),
                **sized_job_spec(job, self.container, template),
            },
        }
        container = next(c for c in template["spec"]["containers"] if c["name"] == self.container)
        ports = [port for port in container.get("ports") or [] if port.get("name") == self.port_name]
        return [manifest, headless_service(parts.metadata, {labels.JOB: str(job.name)}, ports)]

    def replicas(self, job: Object) -> Mapping[str, Replicas]:
        """Return the pods of the Job's indexes."""
        return replicas_of(job, job.get("spec") or {})

    def scaling(self, job: Object, replicas: int) -> Object:
        """Return the patch of an elastic indexed Job: both numbers change together."""
        return {"spec": {"completions": replicas, "parallelism": replicas}}

    def recreatable(self, item: Object) -> Object:
        """Return the Job without its selector and the labels that the API server has put into its template."""
        made = copy.deepcopy(item)
        made["spec"].pop("selector", None)
        metadata = made["spec"]["template"].get("metadata") or {}
        for holder in (metadata, made["metadata"]):
            for label in _ADDED:
                (holder.get("labels") or {}).pop(label, None)
        return made


class JobSet(IndexedTarget):
    """A JobSet of one indexed Job. The controller makes the Service for the names of the pods."""

    name = "jobset"
    kind = "JobSet"
    group = "jobset.x-k8s.io"
    version = "v1alpha2"
    plural = "jobsets"
    success_conditions = ("Completed",)
    controller = JOBSET_CONTROLLER.name
    controllers = (JOBSET_CONTROLLER,)
    controller_pods = "get pods -n jobset-system"

    def render(self, parts: Parts) -> list[Object]:
        """Return the JobSet."""
        job = parts.job
        manifest = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": parts.metadata,
            "spec": {
                **({"suspend": True} if job.queue else {}),  # Kueue starts it
                **ttl_fields(job),
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [
                    {
                        "name": REPLICATED_JOB,
                        "replicas": 1,
                        "template": {"spec": sized_job_spec(job, self.container, parts.template)},
                    }
                ],
            },
        }
        return [manifest]

    def replicas(self, job: Object) -> Mapping[str, Replicas]:
        """Return the pods of the first Job of the set."""
        jobs = (job.get("spec") or {}).get("replicatedJobs") or [{}]
        return replicas_of(job, (jobs[0].get("template") or {}).get("spec") or {})

    def owns(self, pod: Object, uid: str, name: str, created: str | None = None) -> bool:
        """Return whether the pod is of the JobSet's Job, and the controller's label has the JobSet's UID."""
        of_set = labels.of(pod).get("jobset.sigs.k8s.io/jobset-uid") == uid
        return of_set and is_controlled(pod, kind="Job", name=job_of_set(name)) and self.is_named(pod, name)

    def event_objects(self, job: str) -> Sequence[tuple[str, str]]:
        """Return the JobSet and its Job, whose events say why pods were refused."""
        return [(self.kind, job), ("Job", job_of_set(job))]


def job_of_set(name: str) -> str:
    """Return the name of the Job of a JobSet."""
    return f"{name}-{REPLICATED_JOB}-0"


def job_spec(container: str, limit: int) -> Object:
    """Return the fields of an indexed Job that do not depend on its size: which ends of a pod are final.

    An exit code below 128 ends the index, and the other pods end as their launchers decide. 128 and more (signals), a
    lost node and an eviction bring the pod back without being counted: flk's own budgets limit that. ``limit`` counts
    ends without an exit code. Kubernetes waits ten seconds before it brings back a pod, and twice as long each time.
    """
    codes = {"containerName": container, "values": FINAL_CODES}
    return {
        "completionMode": "Indexed",
        "backoffLimit": _LARGEST_INT,
        "backoffLimitPerIndex": limit,
        "podReplacementPolicy": "Failed",  # a pod comes back when the last one with its index has ended
        "podFailurePolicy": {
            "rules": [
                {"action": "FailIndex", "onExitCodes": {"operator": "In", **codes}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "NotIn", **codes}},
            ]
        },
    }


def sized_job_spec(job: JobSpec, container: str, template: Object) -> Object:
    """Return the spec of the indexed Job that runs ``job``.

    Not all pods of an elastic job need to train. The training ends with pod 0, which leads: a pod that starts
    later would wait for it. Kubernetes before 1.31 ignores the field, and such a pod ends after its join timeout.
    """
    by_first = {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if job.elastic or job.spares else {}
    return {
        "completions": job.created_pods,
        "parallelism": job.created_pods,
        **job_spec(container, restart_limit(job)),
        **by_first,
        **({"activeDeadlineSeconds": job.deadline} if job.deadline is not None else {}),
        # Kubernetes may not restart the containers, as a pod failure policy demands.
        "template": {**template, "spec": {**template["spec"], "restartPolicy": "Never"}},
    }


def replicas_of(job: Object, spec: Object) -> Mapping[str, Replicas]:
    """Return the pods of an indexed Job with this spec, and whether its pod failure policy brings them back."""
    policy = EXIT_CODE if spec.get("podFailurePolicy") else REPLACED
    pods = count(job, "completions", spec.get("completions") or 1)
    return {WORKER: Replicas(pods, spec.get("template") or {}, policy)}


def restart_limit(job: JobSpec) -> int:
    """Return how often a pod may end without an exit code."""
    return min(_LARGEST_INT, job.restarts + job.disruptions + 1)


def headless_service(metadata: Object, selector: Mapping[str, str], ports: Sequence[Object]) -> Object:
    """Return the Service that gives the pods of a Job their names, also before they are ready."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {key: metadata[key] for key in ("name", "namespace") if key in metadata}
        | {"labels": {**labels.MANAGED_BY, labels.JOB: metadata["name"]}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": dict(selector),
            "ports": [{"name": port["name"], "port": port["containerPort"]} for port in ports],
        },
    }
