"""IndexedTarget: the common part of the targets whose pods belong to an indexed Job of Kubernetes.

The launchers start the ranks again while their pods run. The Job has to recreate pods that were lost, and must not
recreate pods whose end is final: its pod failure policy says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from flk import labels
from flk.spec import names
from flk.targets.model import EXIT_CODE, REPLACED, WORKER, Object, Replicas, Target, count

if TYPE_CHECKING:
    from flk.spec.job import Job as JobSpec

COMPLETION_INDEX: Final = "batch.kubernetes.io/job-completion-index"
FINAL_CODES: Final = list(range(1, 128))  # exit codes after which a pod is not started again
_NAME_LIMIT: Final = 57  # characters of a pod's name before the random ones
_LARGEST_INT: Final = 2**31 - 1


class IndexedTarget(Target):
    """A target whose pods an indexed Job creates. Their names end with random characters, and pods that come back have
    new names, beside those that have ended."""

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

    def pod_selector(self, job: str) -> str:
        """Return the selector of flk's own label."""
        return f"{labels.JOB}={job}" if job else labels.JOB

    def job_name(self, pod: Object) -> str:
        """Return the name that flk's label gives."""
        return str(labels.of(pod).get(labels.JOB, ""))


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
    """Return the spec of the indexed Job that runs ``job``."""
    return {
        "completions": job.created_pods,
        "parallelism": job.created_pods,
        **job_spec(container, restart_limit(job)),
        **({"activeDeadlineSeconds": job.deadline} if job.deadline is not None else {}),
        "template": with_restart_policy(template),
    }


def replicas_of(job: Object, spec: Object) -> Mapping[str, Replicas]:
    """Return the pods of an indexed Job with this spec, and whether its pod failure policy brings them back."""
    policy = EXIT_CODE if spec.get("podFailurePolicy") else REPLACED
    pods = count(job, "completions", spec.get("completions") or 1)
    return {WORKER: Replicas(pods, spec.get("template") or {}, policy)}


def restart_limit(job: JobSpec) -> int:
    """Return how often a pod may end without an exit code."""
    return min(_LARGEST_INT, job.restarts + job.disruptions + 1)


def with_restart_policy(template: Object) -> Object:
    """Return a pod template whose containers Kubernetes does not restart, as a pod failure policy demands."""
    return {**template, "spec": {**template["spec"], "restartPolicy": "Never"}}


def named(success: str, *others: str) -> Mapping[str, str]:
    """Return the ``condition_names`` of a kind whose condition of success has this name, and that has these others."""
    return {success: "Succeeded", **{name: name for name in ("Failed", "Suspended", *others)}}


def headless_service(metadata: Object, selector: Mapping[str, str], port: Object) -> Object:
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
            "ports": [{"name": port["name"], "port": port["containerPort"]}],
        },
    }
