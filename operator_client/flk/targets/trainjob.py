"""TrainJob: the target of Kubeflow Trainer 2, with a ClusterTrainingRuntime of flk's own.

A TrainJob holds what differs between jobs, and the runtime what all have in common. The runtime's Job recreates lost
pods under the same rules as the other targets.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Final

from flk.errors import UsageError
from flk.spec.units import created_at, timestamp
from flk.targets.indexed import JOBSET_CONTROLLER, IndexedTarget
from flk.targets.model import EXIT_CODE, REPLACED, WORKER, Controller, Object, Parts, Replicas, count, is_controlled
from flk_runtime.contract import VERSION, pod_layout

RUNTIME: Final = "flk"  # name of the ClusterTrainingRuntime
NODE: Final = "node"  # Trainer looks for a Job and a container with this name
_MANAGER: Final = "flk.dev/flk"  # of the patch: who has written it
_JOBSET_NAME: Final = "jobset.sigs.k8s.io/jobset-name"
# Fields of a pod and of a container that runtimePatches may set (trainer.kubeflow.org/v1alpha1, 2.3).
PATCHABLE: Final = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "schedulingGates",
    "securityContext",
    "serviceAccountName",
    "terminationGracePeriodSeconds",
    "tolerations",
    "volumes",
)
PATCHABLE_OF_CONTAINER: Final = ("securityContext", "volumeMounts")
OF_TRAINER: Final = ("name", "image", "command", "args", "env", "resources")

_TRAINER: Final = Controller(
    "trainer",
    "Kubeflow Trainer",
    "app.kubernetes.io/name=trainer",
    "install Kubeflow Trainer 2: k8s/install-trainer in flk's repository, or its own manifests",
)


class TrainJob(IndexedTarget):
    """A TrainJob that uses flk's runtime. Trainer makes a JobSet of the two."""

    name = "trainjob"
    kind = "TrainJob"
    group = "trainer.kubeflow.org"
    version = "v1alpha1"
    plural = "trainjobs"
    success_conditions = ("Complete",)
    container = NODE
    job_label = _JOBSET_NAME  # which TrainJobs without flk have too
    selector = ""
    controller = _TRAINER.name
    controllers = (_TRAINER, JOBSET_CONTROLLER)  # Trainer makes a JobSet of each TrainJob
    controller_pods = "get pods -n kubeflow-system"
    ends_with_first = False  # `successPolicy` is a field of its runtime, which is the same for all jobs
    # As long as the TrainJob exists, Trainer 2.3 creates its JobSet again, also while the TrainJob is being deleted.
    deletion = "Background"

    def render(self, parts: Parts) -> list[Object]:
        """Return the TrainJob. Raises UsageError if the job or its template sets what a TrainJob cannot set."""
        job, spec = parts.job, parts.template["spec"]
        if job.ttl is not None:
            raise UsageError(
                "--ttl: a TrainJob has no such field: only its runtime, which belongs to the administrator and serves "
                "all jobs, could have one",
                hint="choose another --target, or delete it after its end: flk delete --finished --older-than DURATION",
            )
        container = next(c for c in spec["containers"] if c["name"] == NODE)
        _refuse(spec, container)
        patch = {key: spec[key] for key in PATCHABLE if key in spec}
        patch["containers"] = [
            {"name": NODE, **{key: container[key] for key in PATCHABLE_OF_CONTAINER if key in container}}
        ]
        template = {"metadata": parts.template.get("metadata") or {}, "spec": patch}
        trainer: Object = {
            "numNodes": job.replicas,
            "numProcPerNode": job.processes_per_pod,
            **{key: container[key] for key in ("image", "command", "args", "env") if key in container},
            **({"resourcesPerNode": container["resources"]} if "resources" in container else {}),
        }
        patches = {
            "template": {"spec": {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": template}}}]}}
        }
        manifest = {
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": parts.metadata,
            "spec": {
                **({"suspend": True} if job.queue else {}),  # Kueue starts it
                "runtimeRef": {"apiGroup": self.group, "kind": "ClusterTrainingRuntime", "name": RUNTIME},
                **({"activeDeadlineSeconds": job.deadline} if job.deadline is not None else {}),
                "trainer": trainer,
                "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": patches}],
            },
        }
        return [manifest]

    def replicas(self, job: Object) -> Mapping[str, Replicas]:
        """Return the nodes, with the template that the runtime, the trainer and the patches make together."""
        spec = job.get("spec") or {}
        trainer = spec.get("trainer") or {}
        template, from_flk = runtime_template(), (spec.get("runtimeRef") or {}).get("name") == RUNTIME
        for patch in spec.get("runtimePatches") or []:
            _merge(template, copy.deepcopy(_pod_patch(patch)))
        container = template["spec"]["containers"][0]
        container |= {key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer}
        if trainer.get("resourcesPerNode"):
            container["resources"] = trainer["resourcesPerNode"]
        pods = count(job, "numNodes", trainer.get("numNodes") or 1)
        return {WORKER: Replicas(pods, template, EXIT_CODE if from_flk else REPLACED)}

    def owns(self, pod: Object, uid: str, name: str, created: str | None = None) -> bool:
        """Return whether the pod is of the TrainJob's Job, and not older: no pod has the UID of its TrainJob."""
        of_job = is_controlled(pod, kind="Job", name=_job_of(name)) and self.is_named(pod, name)
        return of_job and self.job_name(pod) == name and created_at(pod) >= timestamp(created)

    def event_objects(self, job: str) -> Sequence[tuple[str, str]]:
        """Return the TrainJob, its JobSet and its Job, whose events say why pods were refused."""
        return [(self.kind, job), ("JobSet", job), ("Job", _job_of(job))]

    def pod_specs(self, job: Object) -> list[Object]:
        """Return the pod spec of flk's patch."""
        patches = [patch for patch in job["spec"].get("runtimePatches") or [] if patch.get("manager") == _MANAGER]
        return [_pod_patch(patch).setdefault("spec", {}) for patch in patches]

    def recreatable(self, item: Object) -> Object:
        """Return the TrainJob without Kueue's patches, and without the times of the others."""
        made = copy.deepcopy(item)
        if patches := made["spec"].get("runtimePatches"):
            own = [patch for patch in patches if not str(patch.get("manager", "")).startswith("kueue.x-k8s.io/")]
            made["spec"]["runtimePatches"] = [{k: v for k, v in patch.items() if k != "time"} for patch in own]
        made["spec"].pop("managedBy", None)
        return made


def _job_of(name: str) -> str:
    return f"{name}-{NODE}-0"


def runtime_template() -> Object:
    """Return the runtime's pod template: fields that `flk.manifest.pod` sets in all jobs and a TrainJob cannot set."""
    return {
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": NODE,
                    "image": f"flktrain/flk:{VERSION}-cpu",  # each TrainJob sets its own
                    "imagePullPolicy": "IfNotPresent",
                    "ports": [{"name": TrainJob.port_name, "containerPort": pod_layout.RDZV_PORT}],
                    "terminationMessagePath": pod_layout.TERMINATION_LOG_PATH,
                    "terminationMessagePolicy": "FallbackToLogsOnError",
                }
            ],
        }
    }


def _refuse(spec: Object, container: Object) -> None:
    """Raise UsageError if a pod or its container has what neither the TrainJob nor its runtime can have."""
    base = runtime_template()["spec"]
    allowed = (*PATCHABLE, "containers")
    wrong = [key for key, value in spec.items() if key not in allowed and base.get(key) != value]
    known = (*PATCHABLE_OF_CONTAINER, *OF_TRAINER)
    own = base["containers"][0]
    wrong += [f"containers[{NODE}].{k}" for k, v in container.items() if k not in known and own.get(k) != v]
    wrong += [f"containers[{c['name']}]" for c in spec["containers"] if c is not container]
    if wrong:
        raise UsageError(
            f"target: a TrainJob cannot set {', '.join(sorted(wrong))} of its pods",
            hint="choose another --target, or leave the field out; docs/reference/targets.md lists what each can do",
        )
    mounted = [mount["name"] for mount in container.get("volumeMounts") or []]
    # The definition of runtimePatches takes one mount for each volume. Two volumes of one claim would keep a pod from
    # starting on some kubelets.
    for volume in spec.get("volumes") or []:
        if mounted.count(volume["name"]) > 1:
            name = (volume.get("persistentVolumeClaim") or {}).get("claimName") or volume["name"]
            raise UsageError(
                f"target: a TrainJob cannot mount {name} at two paths",
                hint="choose another --target, or mount the volume once and use its folders",
            )


def _pod_patch(patch: Object) -> Object:
    spec = ((patch.get("trainingRuntimeSpec") or {}).get("template") or {}).get("spec") or {}
    jobs = [job for job in spec.get("replicatedJobs") or [] if job.get("name") == NODE] or [{}]
    found: Object = ((jobs[0].get("template") or {}).get("spec") or {}).get("template") or {}
    return found


def _merge(base: Object, patch: Object) -> None:
    """Merge a patch of a pod template into it, containers by their names."""
    for key, value in patch.items():
        if key == "containers":
            for given in value:
                for container in base[key]:
                    if container["name"] == given.get("name"):
                        container |= given
        elif isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value
