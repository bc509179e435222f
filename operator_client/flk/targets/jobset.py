"""JobSet: the target for clusters with the JobSet controller, without Kubeflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flk import labels
from flk.targets.indexed import IndexedTarget, named, replicas_of, sized_job_spec
from flk.targets.model import Object, Parts, Replicas, is_controlled, ttl_fields

REPLICATED_JOB = "worker"


class JobSet(IndexedTarget):
    """A JobSet of one indexed Job. The controller makes the Service for the names of the pods."""

    name = "jobset"
    kind = "JobSet"
    group = "jobset.x-k8s.io"
    version = "v1alpha2"
    plural = "jobsets"
    controller = "the JobSet controller"
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

    def condition_names(self) -> Mapping[str, str]:
        """Return the conditions of a JobSet."""
        return named("Completed", "StartupPolicyInProgress", "StartupPolicyCompleted")

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
