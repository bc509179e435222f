"""The inputs and results of doctor's checks: what was read of a cluster, what a job asks for, what a check found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

from flk.kube import Object
from flk.targets import DEFAULT, Target, target_of
from flk.targets.gang import Gang, gang_of
from flk.units import parse_quantity

T = TypeVar("T")
Amounts = dict[str, float]  # by resource name; cores, bytes or a number


class Level(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"  # the job can run, but perhaps not now or not well
    FAILED = "failed"  # the job cannot run
    UNKNOWN = "unknown"  # what the check needs could not be read


@dataclass(frozen=True)
class Result:
    """What one check found, in one sentence, and what to do about it."""

    check: str
    level: Level
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Unreadable:
    """Something that was not read: because it does not exist (``missing``), or because of an error."""

    reason: str
    missing: bool = False


@dataclass(frozen=True)
class Facts:
    """What was read of a cluster and of one namespace in it. Objects are dicts of the API's JSON."""

    namespace: str
    flags: str  # the options -n and --context for kubectl
    version: Object | Unreadable  # of the API server
    skew: float  # seconds by which this machine's clock is behind the API server's
    api: Object | Unreadable  # the resources of the target's API version
    controllers: Mapping[str, Sequence[Object] | Unreadable]  # Deployments of the target's controllers, by check
    rights: Mapping[tuple[str, str], bool] | Unreadable  # by verb and resource: whether the user may do it
    space: Object | Unreadable  # the Namespace
    quotas: Sequence[Object] | Unreadable
    limit_ranges: Sequence[Object] | Unreadable
    nodes: Sequence[Object] | Unreadable
    running: Sequence[Object] | Unreadable  # pods of all namespaces that have not ended
    # Only with a job: the objects that its pods name, by kind and name, as ("secrets", "wandb").
    named: Mapping[tuple[str, str], Object | Unreadable] = field(default_factory=dict)
    target: Target = DEFAULT  # what jobs become
    gang: Gang | None = None  # who starts their pods together
    runtime: Object | Unreadable | None = None  # flk's ClusterTrainingRuntime; None: the target needs none
    admission: Object | Unreadable | None = None  # a pod of the job as the API server would admit it; None: not tried

    def command(self, words: str) -> str:
        """Return a kubectl command for this namespace and context."""
        return f"kubectl {words}{self.flags}"


class Pods:
    """What a job asks for: the pods of a job's manifest, which are all equal."""

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
        """What the scheduler reserves for one pod: its requests, which are the limits where only these are set."""
        total: Amounts = {}
        for container in self.containers:
            resources = container.get("resources") or {}
            for name, amount in {**(resources.get("limits") or {}), **(resources.get("requests") or {})}.items():
                total[name] = total.get(name, 0.0) + quantity(amount)
        return total

    @property
    def claims(self) -> list[str]:
        """Names of the PersistentVolumeClaims that the pods mount."""
        volumes = self.spec.get("volumes") or []
        return sorted({v["persistentVolumeClaim"]["claimName"] for v in volumes if v.get("persistentVolumeClaim")})

    @property
    def pull_secrets(self) -> list[str]:
        """Names of the Secrets with which nodes pull the images."""
        return sorted({str(secret.get("name")) for secret in self.spec.get("imagePullSecrets") or []})

    @property
    def service_account(self) -> str:
        """Name of the pods' ServiceAccount."""
        return str(self.spec.get("serviceAccountName") or "default")

    @property
    def priority_class(self) -> str:
        """Name of the pods' PriorityClass; empty for none."""
        return str(self.spec.get("priorityClassName") or "")

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


def quantity(value: Any) -> float:
    """Return a quantity of Kubernetes as a number; 0 for anything else."""
    try:
        return float(parse_quantity(str(value)))
    except ValueError:
        return 0.0


def amount_text(resource: str, amount: float) -> str:
    """Return an amount as people write it: ``4``, ``1.5``, and ``16Gi`` for memory."""
    if "memory" in resource or "storage" in resource or "hugepages" in resource:
        for unit, scale in (("Ti", 1 << 40), ("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
            if abs(amount) >= scale:
                return f"{amount / scale:.4g}{unit}"
    return f"{amount:.6g}"
