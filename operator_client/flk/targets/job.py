"""Job: the target for clusters without an operator: an indexed Job of Kubernetes and a headless Service."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Final

from flk import labels
from flk.targets.indexed import IndexedTarget, headless_service, named, replicas_of, sized_job_spec
from flk.targets.model import Object, Parts, Replicas, ttl_fields

# Labels that the API server adds to the template of a Job, by which it finds the Job's pods.
_ADDED: Final = (
    "batch.kubernetes.io/controller-uid",
    "batch.kubernetes.io/job-name",
    "controller-uid",
    "job-name",
)


class IndexedJob(IndexedTarget):
    """An indexed Job, with a headless Service for the names of its pods."""

    name = "job"
    kind = "Job"
    group = "batch"
    version = "v1"
    plural = "jobs"
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
        port = next(port for port in container["ports"] if port.get("name") == self.port_name)
        service = headless_service(parts.metadata, {labels.JOB: str(job.name)}, port)
        return [manifest, service]

    def replicas(self, job: Object) -> Mapping[str, Replicas]:
        """Return the pods of the Job's indexes."""
        return replicas_of(job, job.get("spec") or {})

    def condition_names(self) -> Mapping[str, str]:
        """Return the conditions of a Job."""
        return named("Complete", "SuccessCriteriaMet", "FailureTarget")

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
