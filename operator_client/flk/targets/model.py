"""Target: the adapter interface for one kind of object that a job can become, from its manifest to its status."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from flk.errors import UnreadableError
from flk.spec import labels
from flk_runtime.contract import foreign, pod_env, pod_layout
from flk_runtime.contract.values import dataclass

if TYPE_CHECKING:
    from flk.spec.job import Job

Object = dict[str, Any]  # an object of the API, as its JSON

WORKER: Final = "Worker"  # the role of all pods, but of a PyTorchJob's Master
EXIT_CODE: Final = "ExitCode"  # restart policy: exit codes below 128 are final, 128 and more bring the pod back
KEPT_BY_KUBELET: Final = ("Always", "OnFailure")  # restart policies with which the kubelet starts containers again
REPLACED: Final = "Replaced"  # restart policy of pods that their controller replaces, however they have ended


# What a job of flk may have, and so what is read of objects that others may have written.
MOST_PODS: Final = 101_024  # replicas and spares
MOST_PROCESSES: Final = 1_024


@dataclass(frozen=True)
class Parts:
    """The input of a manifest: the job, its metadata and the template of its pods."""

    job: Job
    metadata: Object
    template: Object


@dataclass(frozen=True)
class Replicas:
    """The pods of one role in a job: their number, their template, and their restart policy."""

    count: int
    template: Object
    restart_policy: str = ""


@dataclass(frozen=True)
class Controller:
    """A controller of jobs, which runs as a Deployment."""

    check: str  # name of doctor's check of this controller
    name: str  # with its article, as sentences have it
    selector: str  # labels of its Deployment and of its pods
    install: str  # how to install it


@dataclass(frozen=True)
class Trouble:
    """Why a controller does not work: its Deployment has no ready pod."""

    found: str  # what follows the name of the controller: "is scaled to 0 pods"
    field: str  # path in the Deployment
    value: str
    remedy: str  # words for kubectl, with the namespace


def trouble(controller: Controller, deployment: Object) -> Trouble | None:
    """Return why a controller with this Deployment does not work, None if it has a ready pod."""
    name, where = deployment["metadata"]["name"], f"-n {deployment['metadata']['namespace']}"
    wanted = int((deployment.get("spec") or {}).get("replicas", 1))
    ready = int((deployment.get("status") or {}).get("readyReplicas") or 0)
    if wanted == 0:
        return Trouble("is scaled to 0 pods", "spec.replicas", "0", f"scale deployment {name} --replicas 1 {where}")
    if ready == 0:
        found = "has no pod that is ready"
        return Trouble(
            found, "status.readyReplicas", f"0 of {wanted}", f"describe pods -l {controller.selector} {where}"
        )
    return None


class Target(ABC):
    """One kind of object that a job can become. All methods are pure functions of objects of the API."""

    name: ClassVar[str]  # the value of --target
    kind: ClassVar[str]
    group: ClassVar[str]
    version: ClassVar[str]
    plural: ClassVar[str]
    container: ClassVar[str] = pod_layout.CONTAINER  # name of the training container
    port_name: ClassVar[str] = "rendezvous"  # of the port at which the launcher of pod 0 listens
    job_label: ClassVar[str] = labels.JOB  # of pods: the name of their job
    index_field: ClassVar[str]  # of the downward API: where a pod finds its index
    suspend_path: ClassVar[str] = "spec.suspend"
    selector: ClassVar[str] = labels.JOB  # which objects of this kind are training jobs; empty: all
    success_conditions: ClassVar[Sequence[str]] = ("Succeeded",)  # types, each of which says so
    controllers: ClassVar[Sequence[Controller]] = ()  # that a cluster needs, the one that serves its API first
    controller: ClassVar[str]  # who creates the pods, with its article
    controller_pods: ClassVar[str]  # words for kubectl that show the controller's pods
    scalable: ClassVar[bool] = False  # whether the number of pods can change while the job runs
    ends_with_first: ClassVar[bool] = True  # whether the job ends with pod 0, so that not all pods need to train
    keeps_ended: ClassVar[bool] = True  # whether pods that have ended stay when the job is suspended
    deletion: ClassVar[str] = "Foreground"  # propagation policy: the object stays until its pods are gone

    @property
    def api_version(self) -> str:
        """The ``apiVersion`` of its objects."""
        return f"{self.group}/{self.version}"

    @property
    def framework(self) -> str:
        """The name of its kind in Kueue's configuration (``integrations.frameworks``)."""
        return f"{self.group}/{self.kind.lower()}"

    # Rendering

    @abstractmethod
    def render(self, parts: Parts) -> list[Object]:
        """Return the object of the job, and then the objects that it needs beside it and owns.

        Raises UsageError if this target cannot express the job.
        """

    @abstractmethod
    def pod_host(self, job: str, pod: int | str) -> str:
        """Return the name by which pods reach the pod with an index, or with a placeholder for the index."""

    # Reading

    @abstractmethod
    def replicas(self, job: Object) -> Mapping[str, Replicas]:
        """Return the pods that an object should have, by role, in the order of their indexes."""

    @abstractmethod
    def pod_name(self, job: str, role: str, number: int | str) -> str:
        """Return the name of a pod, without the random suffix that some controllers add."""

    def base_name(self, pod: str) -> str:
        """Return the name of a pod without the random suffix that its controller has added."""
        return pod

    @abstractmethod
    def position(self, pod: Object) -> tuple[str, int]:
        """Return the role and the number of a pod in its role."""

    def pod_selector(self, job: str) -> str:
        """Return the label selector of the pods of a job, or, for an empty name, of all jobs of this target."""
        return f"{self.job_label}={job}" if job else self.job_label

    def job_name(self, pod: Object) -> str:
        """Return the name of the job that a pod belongs to."""
        return str(labels.of(pod).get(self.job_label, ""))

    def owns(self, pod: Object, uid: str, name: str, created: str | None = None) -> bool:
        """Return whether a pod belongs to exactly the job of a UID, and not to an earlier one of the same name.

        ``created`` is the job's ``creationTimestamp``, None if it is not known. Labels and owners are as whoever has
        created the pod has written them, so the pod must also have the name that the job's controller gives it.
        """
        return is_controlled(pod, uid=uid) and self.is_named(pod, name)

    def is_named(self, pod: Object, job: str) -> bool:
        """Return whether a pod has the name that the pod of its role and index has in a job."""
        return self.base_name(pod["metadata"]["name"]) == self.pod_name(job, *self.position(pod))

    def own(self, pods: Iterable[Object], job: Object) -> list[Object]:
        """Return the pods that belong to exactly this object."""
        meta = job["metadata"]
        return [pod for pod in pods if self.owns(pod, meta["uid"], meta["name"], meta.get("creationTimestamp"))]

    def processes(self, job: Object) -> int:
        """Return the number of ranks in each pod."""
        for role in self.replicas(job).values():
            for container in (role.template.get("spec") or {}).get("containers") or []:
                for variable in container.get("env") or []:
                    if variable.get("name") == pod_env.PROCESSES and str(variable.get("value", "")).isdigit():
                        return count(job, pod_env.PROCESSES, variable["value"], MOST_PROCESSES)
        return 1

    def conditions(self, job: Object) -> dict[str, Object]:
        """Return the conditions that are true, by type. Every kind has the types Succeeded, Failed and Suspended."""
        found = (job.get("status") or {}).get("conditions") or []
        kinds = dict.fromkeys(self.success_conditions, "Succeeded")
        return {kinds.get(c["type"], c["type"]): c for c in found if c.get("status") == "True"}

    def is_seen(self, job: Object) -> bool:
        """Return whether the controller has written anything into the object's status."""
        return bool(job.get("status"))

    def suspended(self, job: Object) -> bool:
        """Return whether the object's spec says that the job is suspended."""
        return bool((job.get("spec") or {}).get("suspend"))

    def event_objects(self, job: str) -> Sequence[tuple[str, str]]:
        """Return kind and name of the objects whose events are about a job, its own first."""
        return [(self.kind, job)]

    # Changing

    def suspension(self, suspended: bool) -> Object:
        """Return the merge patch that suspends or resumes a job."""
        return {"spec": {"suspend": suspended}}

    def start_mark(self, job: Object, moment: str) -> Object:
        """Return the merge patch that tells the pods of a job when it starts; empty if they do not need to know."""
        return {}

    def scaling(self, job: Object, replicas: int) -> Object:
        """Return the merge patch that changes the number of pods. Only for targets that are ``scalable``."""
        raise NotImplementedError(f"a {self.kind} cannot change its number of pods")

    def pod_specs(self, job: Object) -> list[Object]:
        """Return the parts of an object that hold the affinity of its pods: who changes them changes the object."""
        return [role.template.setdefault("spec", {}) for role in self.replicas(job).values()]

    def recreatable(self, item: Object) -> Object:
        """Return a stored object without what the API server has added, so that it can be created again."""
        return item


def count(job: Object, field: str, value: Any, most: int = MOST_PODS) -> int:
    """Return a number of a job's object, of which something is made for each. Raises UnreadableError."""
    try:
        return foreign.whole(value, 0, most)
    except foreign.ForeignError as error:
        kind, name = job.get("kind") or "job", (job.get("metadata") or {}).get("name", "")
        raise UnreadableError(f"{field} of {kind} {name} cannot be used: {error}") from None


def ttl_fields(job: Job) -> Object:
    """Return the field with which a controller deletes a job some time after its end; empty if the job stays."""
    return {"ttlSecondsAfterFinished": job.ttl} if job.ttl is not None else {}


def is_controlled(pod: Object, **owner: str) -> bool:
    """Return whether the controller of a pod, as its metadata name it, has these fields: kind, name, UID."""
    references = pod["metadata"].get("ownerReferences") or []
    return any(each.get("controller") is True and owner.items() <= each.items() for each in references)


def is_owner(uid: str, item: Object) -> bool:
    """Return whether an object has an owner with this UID."""
    return any(owner.get("uid") == uid for owner in item["metadata"].get("ownerReferences") or [])
