"""The input and the results of the checks before a job exists: Cluster, Pods, Result and Unreadable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from flk import labels
from flk.commands import Commands
from flk.health.resources import Amounts, requests
from flk.kube import Object, Resource
from flk.observe.pods import claims_of
from flk.targets import DEFAULT, Target, target_of
from flk.targets.gang import Gang, gang_of


class Level(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # the job can run, but perhaps not now or not well
    FAILED = "failed"  # the job cannot run
    UNKNOWN = "unknown"  # the objects that the check needs could not be read


@dataclass(frozen=True)
class Result:
    """The result of one check: its level, one sentence, and a remedy."""

    check: str
    level: Level
    found: str
    remedy: str = ""
    code: str = ""  # of the cause that the job would have; empty where there is none


@dataclass(frozen=True)
class Unreadable:
    """An object or a list that could not be read: it does not exist (``missing``), or the request failed."""

    reason: str
    missing: bool = False
    remedy: str = ""  # where the error has one
    causes: Sequence[str] = ()  # of the refusal, in the API's words

    def result(self, check: str, found: str, remedy: str = "", code: str = "", *, unread: str) -> Result:
        """Return the result of a check that needs it: ``found`` if it is missing, else ``unread`` and the reason."""
        if self.missing:
            return Result(check, Level.FAILED, found, remedy, code)
        return Result(check, Level.UNKNOWN, f"{unread}: {self.reason}")


@dataclass(frozen=True)
class Cluster:
    """Everything that was read of a cluster and of one namespace in it. Objects are dicts of the API's JSON."""

    namespace: str
    commands: Commands  # makes the commands that are suggested
    version: Object | Unreadable  # of the API server
    skew: float  # seconds by which this machine's clock is behind the API server's
    api: Resource | Unreadable  # the target's objects, in the version that the cluster serves
    controllers: Mapping[str, Sequence[Object] | Unreadable]  # Deployments of the target's controllers, by check
    rights: Mapping[tuple[str, str], bool] | Unreadable  # by verb and resource: whether the user may do it
    quotas: Sequence[Object] | Unreadable
    limit_ranges: Sequence[Object] | Unreadable
    nodes: Sequence[Object] | Unreadable
    running: Sequence[Object] | Unreadable  # pods of all namespaces that have not ended
    autoscaler: str = ""  # who may add nodes; empty: nobody is known to
    # Only with a job: the objects that its pods name, by kind and name, as ("secrets", "wandb").
    named: Mapping[tuple[str, str], Object | Unreadable] = field(default_factory=dict)
    devices: Resource | Unreadable | None = None  # the templates of claims of devices; None: the pods claim none
    target: Target = DEFAULT  # the target of jobs
    gang: Gang | None = None  # the gang scheduler of the job
    gang_api: Resource | Unreadable | None = None  # its PodGroups; None: no gang
    runtime: Object | Unreadable | None = None  # flk's ClusterTrainingRuntime; None: the target needs none
    admission: Object | Unreadable | None = None  # a pod of the job as the API server would admit it; None: not tried
    accepted: Object | Unreadable | None = None  # a ConfigMap as it would be created in the namespace; None: not tried


class Pods:
    """The requests and references of a job's pods, read from its manifest; all pods are equal."""

    def __init__(self, manifest: Object) -> None:
        self.manifest = manifest
        self.name = str(manifest["metadata"].get("name") or "")
        self.target = target_of(manifest)
        self.gang = gang_of(manifest)
        roles = [*self.target.replicas(manifest).values()]
        self.count = sum(role.count for role in roles)
        self.template: Object = roles[0].template
        self.spec: Object = self.template["spec"]

    @property
    def containers(self) -> list[Object]:
        """The containers of a pod, without those that initialize it."""
        return list(self.spec.get("containers") or [])

    @cached_property
    def requests(self) -> Amounts:
        """The amounts that the scheduler reserves for one pod."""
        return requests(self.spec)

    @property
    def claims(self) -> list[str]:
        """Names of the PersistentVolumeClaims that the pods mount."""
        return sorted(set(claims_of(self.template)))

    @property
    def device_claims(self) -> list[tuple[str, str]]:
        """What the pods claim devices by: ``resourceclaimtemplates`` or ``resourceclaims``, and the name."""
        found = set()
        for claim in self.spec.get("resourceClaims") or []:
            for field_name, plural in (
                ("resourceClaimTemplateName", "resourceclaimtemplates"),
                ("resourceClaimName", "resourceclaims"),
            ):
                if claim.get(field_name):
                    found.add((plural, str(claim[field_name])))
        return sorted(found)

    @property
    def mounted(self) -> list[tuple[str, str]]:
        """The objects whose keys the pods mount as files: ``secrets`` or ``configmaps``, and the name."""
        found = set()
        for volume in self.spec.get("volumes") or []:
            secret, config_map = volume.get("secret") or {}, volume.get("configMap") or {}
            for kind, name, source in (
                ("secrets", secret.get("secretName"), secret),
                ("configmaps", config_map.get("name"), config_map),
            ):
                if name and not source.get("optional"):
                    found.add((kind, str(name)))
        return sorted(found)

    @property
    def pull_secrets(self) -> list[str]:
        """Names of the Secrets with which nodes pull the images."""
        return sorted({str(secret.get("name")) for secret in self.spec.get("imagePullSecrets") or []})

    @property
    def queue(self) -> str:
        """Name of the job's Kueue queue; empty for none."""
        return str(labels.of(self.manifest).get(labels.QUEUE) or "")

    @property
    def named(self) -> list[tuple[str, str]]:
        """Kind (in plural) and name of every object that the pods name."""
        found = [("persistentvolumeclaims", name) for name in self.claims]
        found += [("secrets", name) for name in self.pull_secrets]
        found += [*self.mounted, *((kind, name) for kind, name, _ in self.keys)]
        if self.queue:
            found.append(("localqueues", self.queue))
        return sorted(set(found))

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """The keys that the environment takes from objects: ``secrets`` or ``configmaps``, the name, the key."""
        found = []
        for container in self.containers:
            for variable in container.get("env") or []:
                source = variable.get("valueFrom") or {}
                for field_name, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
                    reference = source.get(field_name)
                    if reference and not reference.get("optional"):
                        found.append((plural, str(reference["name"]), str(reference["key"])))
        return sorted(set(found))
