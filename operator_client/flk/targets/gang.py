"""Gang scheduling: a table of the schedulers that start all pods of a job together or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from flk.errors import UsageError
from flk.spec import labels
from flk.spec.names import NO_GANG, split_topology
from flk.targets.model import MOST_PODS, Object
from flk_runtime.contract import foreign
from flk_runtime.contract.options import AUTO
from flk_runtime.contract.values import dataclass, field

if TYPE_CHECKING:
    from flk.spec.job import Job


@dataclass(frozen=True)
class Gang:
    """One gang scheduler: the API of its PodGroup, the group's spec, and the fields that name the group in a pod.

    The spec is the same in all ``versions`` of the API that flk knows, the best first.
    """

    group: str
    versions: tuple[str, ...]
    install: str  # how a cluster gets it
    spec: Callable[[Job], Object]
    pod_spec: Callable[[str], Object]  # of the group's name
    labels: Callable[[str], Object] = field(default=lambda group: {})
    annotations: Callable[[str], Object] = field(default=lambda group: {})

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its PodGroups in the best version that flk knows."""
        return f"{self.group}/{self.versions[0]}"


GANGS: Final[dict[str, Gang]] = {
    # Kubernetes 1.36 and newer, with the feature gates GenericWorkload and GangScheduling.
    "native": Gang(
        "scheduling.k8s.io",
        ("v1beta1", "v1alpha3", "v1alpha2"),  # from 1.37 on, of 1.37, of 1.36
        "use Kubernetes 1.36 or newer with the feature gates GenericWorkload and GangScheduling",
        lambda job: {"schedulingPolicy": {"gang": {"minCount": job.least_pods}}, **_constraints(job), **_priority(job)},
        lambda group: {"schedulingGroup": {"podGroupName": group}},
    ),
    "volcano": Gang(
        "scheduling.volcano.sh",
        ("v1beta1",),
        "install Volcano",
        lambda job: {"minMember": job.least_pods, **_priority(job)},
        lambda group: {"schedulerName": "volcano"},
        annotations=lambda group: {"scheduling.k8s.io/group-name": group},
    ),
    # Of the scheduler plugins; its scheduler has this name in their own chart.
    "coscheduling": Gang(
        "scheduling.x-k8s.io",
        ("v1alpha1",),
        "install the scheduler plugins of Kubernetes",
        lambda job: {"minMember": job.least_pods},
        lambda group: {"schedulerName": "scheduler-plugins-scheduler"},
        labels=lambda group: {"scheduling.x-k8s.io/pod-group": group},
    ),
}


def pod_groups(job: Job, in_namespace: Object) -> list[Object]:
    """Return the PodGroup of a job that has a gang scheduler, in a list; an empty list for other jobs."""
    gang = _gang(job)
    if gang is None:
        return []
    metadata = {"name": job.name, **in_namespace, "labels": {**labels.MANAGED_BY, labels.JOB: job.name}}
    return [{"apiVersion": gang.api_version, "kind": "PodGroup", "metadata": metadata, "spec": gang.spec(job)}]


def gang_of(manifest: Object) -> Gang | None:
    """Return the gang scheduler of a job's object, from the job that flk has recorded in it; None for none."""
    try:
        spec = foreign.parse_object(labels.annotations_of(manifest).get(labels.SPEC) or "{}")
        pods = foreign.whole(spec.get("replicas", 1), 1, MOST_PODS)
    except foreign.ForeignError:
        return None
    return GANGS.get(str(spec.get("gang", ""))) if pods > 1 else None


def add_gang(template: Object, job: Job) -> None:
    """Name the PodGroup of a job in the template of its pods. Raises UsageError for ``auto``."""
    gang = _gang(job)
    if gang is not None:
        group = str(job.name)
        template["metadata"]["labels"] |= gang.labels(group)
        template["metadata"]["annotations"] |= gang.annotations(group)
        template["spec"] |= gang.pod_spec(group)


def _priority(job: Job) -> Object:
    """Return the priority class of the pods for their group, whose priority is zero without one, whatever theirs is."""
    return {"priorityClassName": job.pods.priority_class} if job.pods and job.pods.priority_class else {}


def _constraints(job: Job) -> Object:
    """Return the topology in which Kubernetes has to find room for all pods of a group at once.

    The affinity of the pods asks for the same of each pod after the first one, whose place may leave no room for them.
    """
    if not job.topology:
        return {}
    key, strength = split_topology(str(job.topology))
    return {"schedulingConstraints": {"topology": [{"key": key}]}} if strength == "required" else {}


def _gang(job: Job) -> Gang | None:
    """Return the gang scheduler of a job; None without one, and for one pod. Raises UsageError for ``auto``."""
    name = job.gang or NO_GANG
    if name == AUTO:
        raise UsageError(
            "gang: auto asks the cluster, which only flk submit does",
            hint=f"choose one: --gang {', '.join([*GANGS, NO_GANG])}",
        )
    return None if name == NO_GANG or job.replicas == 1 else GANGS[name]
