"""Volumes: claims that a job names, and pods whose volumes are missing or cannot be mounted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from flk.health.autoscaling import is_adding
from flk.health.cause import Cause, Found, Locate, Match, event_evidence, names, tell
from flk.health.cluster import Cluster, Level, Pods, Result, Unreadable
from flk.health.resources import (
    bound_volumes,
)
from flk.health.scheduling import scheduler_says, unschedulable
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.observation import involved
from flk.observe.pods import claims_of, one_line
from flk.observe.view import JobView
from flk.units import created_at
from flk_runtime.contract import user_env

_ONE_NODE: Final = "ReadWriteOnce"
_ONE_POD: Final = "ReadWriteOncePod"
_READ_ONLY: Final = "ReadOnlyMany"
_WAITS: Final = "WaitForFirstConsumer"
_CLAIM_MISSING: Final = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_CLAIM_DELETED: Final = re.compile(r'persistentvolumeclaim "([^"]+)" is being deleted')
_CLAIM_UNBOUND: Final = re.compile("unbound immediate PersistentVolumeClaims")
_OTHER_NODE: Final = re.compile("volume node affinity conflict|PersistentVolume's node affinity")
_PROVISIONER_WORKS: Final = ("ExternalProvisioning", "Provisioning")
_PROVISIONER_GRACE: Final = 900.0  # seconds: file systems of clouds take up to ten minutes
_PROVISIONER_FAILS_GRACE: Final = 300.0  # seconds: a provisioner tries again after a failure
_MULTI_ATTACH: Final = re.compile(r'Multi-Attach error for volume "([^"]+)"')
_MOUNT_OBJECT: Final = re.compile(r'(configmap|secret) "([^"]+)" not found')


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that the claims exist, are or will be bound, and can be mounted by all pods."""
    fine: list[str] = []
    for name in pods.claims:
        claim = cluster.named.get(("persistentvolumeclaims", name))
        if isinstance(claim, Unreadable):
            create = cluster.commands.kubectl("apply -f claim.yaml")
            remedy = f"create it, with access mode ReadWriteMany for several pods: {create}"
            found, unread = f"there is no PersistentVolumeClaim {name}", f"PersistentVolumeClaim {name} cannot be read"
            yield claim.result("claim", found, remedy, "ClaimMissing", unread=unread)
        elif claim is not None:
            problems = list(_claim_problems(cluster, pods, name, claim))
            yield from problems
            if not problems:
                modes = ", ".join(claim["spec"].get("accessModes") or [])
                fine.append(f"{name} ({modes})")
    if fine:
        yield Result("claim", Level.OK, f"exist: {', '.join(fine)}")


def _claim_problems(cluster: Cluster, pods: Pods, name: str, claim: Object) -> Iterator[Result]:
    what = f"PersistentVolumeClaim {name}"
    modes: Sequence[str] = claim["spec"].get("accessModes") or []
    describe = cluster.commands.kubectl(f"describe pvc {name}")
    many = "use a claim with access mode ReadWriteMany, or --replicas 1"
    if claim["metadata"].get("deletionTimestamp"):
        yield Result("claim", Level.FAILED, f"{what} is being deleted", "use another claim", "ClaimBeingDeleted")
    phase = (claim.get("status") or {}).get("phase")
    if phase == "Lost":
        yield Result("claim", Level.FAILED, f"{what} has lost its volume", describe, "ClaimUnbound")
    if phase == "Pending" and not _waits_for_pod(cluster, claim):
        found = f"{what} is not bound to a volume yet; pods wait for it"
        yield Result("claim", Level.WARNING, found, f"{describe} shows why", "ClaimUnbound")
    if pods.count > 1 and list(modes) == [_ONE_POD]:
        found = f"{what} can be mounted by one pod only ({_ONE_POD}), and the job has {pods.count}"
        yield Result("claim", Level.FAILED, found, many, "Unschedulable")
    elif pods.count > 1 and _ONE_NODE in modes and not {"ReadWriteMany", _READ_ONLY} & set(modes):
        found = f"{what} can be mounted on one node at a time only ({_ONE_NODE}), and the job has {pods.count} pods"
        yield Result("claim", Level.WARNING, found, many, "VolumeOnOtherNode")
    elif modes and set(modes) <= {_READ_ONLY} and _written(pods, name):
        found = f"{what} is read-only ({_READ_ONLY}), and checkpoints go to it"
        yield Result("claim", Level.FAILED, found, many, "ReadOnlyVolume")


def _waits_for_pod(cluster: Cluster, claim: Object) -> bool:
    """Return whether the claim's volume is made only when a pod uses it; also where the class cannot be read."""
    storage_class = cluster.named.get(("storageclasses", str(claim["spec"].get("storageClassName") or "")))
    if storage_class is None or isinstance(storage_class, Unreadable):
        return True
    return bool(storage_class.get("volumeBindingMode") == _WAITS)


def _written(pods: Pods, claim: str) -> bool:
    """Return whether checkpoints go to a claim, by the variable that names their folder."""
    volumes = {
        v["name"]
        for v in pods.spec.get("volumes") or []
        if (v.get("persistentVolumeClaim") or {}).get("claimName") == claim
    }
    for container in pods.containers:
        environment = {v.get("name"): str(v.get("value")) for v in container.get("env") or []}
        folder = environment.get(str(user_env.CHECKPOINT), "")
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") in volumes and folder.startswith(str(mount.get("mountPath")) + "/"):
                return True
    return False


def _claim_unbound(view: JobView) -> Found | None:
    found = scheduler_says(_CLAIM_UNBOUND)(view)
    if found is None:
        return None
    claims = claims_of(view.objects[found.pods[0]])
    for name in claims:
        claim = view.seen.claims.get(name)
        phase = str(((claim or {}).get("status") or {}).get("phase") or "Pending")
        if claim is None or phase == "Bound":
            continue
        spec = claim.get("spec") or {}
        storage = str(spec.get("storageClassName") or "")
        text = f"{phase}, storage class {storage or '(none)'}, {', '.join(spec.get('accessModes') or [])}"
        created = created_at(claim)
        about = [e for e in view.events if _about(e) == ("PersistentVolumeClaim", name)]
        failures = [e for e in about if e.get("reason") == "ProvisioningFailed"]
        said = (failures or about)[-1:]
        why = one_line(said[0].get("message")) if said else "no volume matches it"
        return found.found(
            f"{found} cannot be scheduled: the PersistentVolumeClaim {name} has no volume (storage class "
            f"{storage or 'none'}): {why}",
            f"{view.kubectl(f'describe persistentvolumeclaim {name}')} shows more; "
            f"{view.kubectl_of_cluster('get storageclasses')} lists "
            "the classes that exist",
            Evidence(f"PersistentVolumeClaim {name}", text, "status.phase", created),
            *map(event_evidence, said),
            grace=_provisioner_grace(about, failures),
        )
    return found.found(
        f"{found} cannot be scheduled: {', '.join(claims) or 'a claim'} has no volume",
        f"{view.kubectl('get persistentvolumeclaims')} shows the claims",
    )


def _provisioner_grace(events: Sequence[Object], failures: Sequence[Object]) -> float | None:
    """Return the seconds that a claim's provisioner gets by the claim's events; None where none works on the claim."""
    if not any(event.get("reason") in _PROVISIONER_WORKS for event in events):
        return None
    return _PROVISIONER_FAILS_GRACE if failures else _PROVISIONER_GRACE


def _about(event: Object) -> tuple[object, object]:
    about = involved(event)
    return about.get("kind"), about.get("name")


def _on_other_node(view: JobView) -> Match | None:
    """Find pods that may not run where their volume is; not those that have no room on the nodes where they may."""
    closest = None if is_adding(view) else unschedulable(view)
    found = scheduler_says(_OTHER_NODE)(view) if closest and closest[1].kind == "volume" else None
    if found is None:
        return None
    return replace(found, evidence=[*found.evidence, *(each.evidence for each in bound_volumes(view, found.pods[0]))])


def _claims(view: JobView, found: Match) -> str:
    """Return the names of the claims that the pods mount; empty if they have none."""
    return ", ".join(claims_of(view.objects[found.pods[0]]))


def _where(view: JobView, found: Match) -> str:
    """Say where the volumes are, as far as that is known."""
    volumes = [str(volume) for volume in bound_volumes(view, found.pods[0])]
    return f": {'; '.join(volumes)}" if volumes else ""


def _mount_events(view: JobView) -> Iterator[tuple[PodState, Object, str]]:
    """Yield pods whose volumes cannot be mounted, with the last event that says so and its message."""
    for pod in view.pods:
        if pod.phase != PodPhase.STARTING:
            continue
        for event in reversed(view.pod_events.get(pod.name, [])):
            text = one_line(event.get("message"))
            # "unmounted volumes" only repeats that something is missing.
            if event.get("reason") in ("FailedMount", "FailedAttachVolume") and "timed out waiting" not in text:
                yield pod, event, text
                break


def _unmounted(pattern: re.Pattern[str]) -> Locate:
    """Return a Locate for the first pod with a volume that cannot be mounted, where the reason matches ``pattern``."""

    def locate(view: JobView) -> Match | None:
        for pod, event, text in _mount_events(view):
            if match := pattern.search(text):
                return Match([pod.name], [event_evidence(event)], (match[0], *match.groups("")))
        return None

    return locate


def _source_missing(*, code: bool) -> Locate:
    """Return a Locate for pods that wait for a Secret or ConfigMap: with the job's code (``code``), or another one."""

    def locate(view: JobView) -> Match | None:
        for pod, event, text in _mount_events(view):
            match = _MOUNT_OBJECT.search(text)
            if match is None:
                continue
            kind = "ConfigMap" if match[1] == "configmap" else "Secret"
            archives = (f"{view.name}-", "flk-runtime-", "flk-code-")
            if (kind == "ConfigMap" and view.from_flk and match[2].startswith(archives)) == code:
                starting = [p for p in view.pods if p.phase == PodPhase.STARTING and p.reason in ("FailedMount", "")]
                return Match(names(starting) or [pod.name], [event_evidence(event)], (match[0], kind, match[2]))
        return None

    return locate


_SCHEDULED: Final = "flk reads the condition PodScheduled of the pods, and the claims that they name."
_MOUNTED: Final = "flk reads the events FailedMount and FailedAttachVolume of the pods."
CAUSES: Final = (
    Cause(
        "ClaimMissing",
        tell(
            scheduler_says(_CLAIM_MISSING),
            lambda view, trace: (
                f"{trace} cannot be scheduled: the PersistentVolumeClaim {trace[1]} does not exist in namespace "
                f"{view.namespace}"
            ),
            lambda view, trace: (
                f"{view.kubectl('get persistentvolumeclaims')} lists those that exist; correct --volume or "
                "--checkpoint, or create the claim"
            ),
        ),
        grace=30,
    ),
    Cause(
        "ClaimBeingDeleted",
        tell(
            scheduler_says(_CLAIM_DELETED),
            lambda view, trace: f"{trace} cannot be scheduled: the PersistentVolumeClaim {trace[1]} is being deleted",
            lambda view, trace: (
                f"{view.kubectl(f'describe persistentvolumeclaim {trace[1]}')} shows what still uses it"
            ),
        ),
        grace=30,
    ),
    Cause(
        "ClaimUnbound",
        _claim_unbound,
        grace=60,
    ),
    Cause(
        "VolumeOnOtherNode",
        tell(
            _on_other_node,
            lambda view, trace: (
                f"{trace} cannot be scheduled: the volume of {_claims(view, trace) or 'the volume'} belongs to another "
                f"node or zone than the nodes that the pods may run on{_where(view, trace)}"
            ),
            lambda view, trace: (
                "use a claim with access mode ReadWriteMany for several pods, or let the pods run on the volume's "
                f"node; {view.kubectl('get persistentvolumeclaims')} shows the access modes"
            ),
        ),
        grace=60,
    ),
    Cause(
        "VolumeAttachedElsewhere",
        tell(
            _unmounted(_MULTI_ATTACH),
            lambda view, trace: (
                f"{trace} cannot start: the volume of {_claims(view, trace) or trace[1]} is "
                "attached to another node and may be attached to one node only"
            ),
            lambda view, trace: (
                "use a claim with access mode ReadWriteMany, or end the pod that uses the volume: "
                f"{view.kubectl('get pods -o wide')}"
            ),
        ),
        grace=420,
    ),
    Cause(
        "CodeNotMounted",
        tell(
            _source_missing(code=True),
            lambda view, trace: (
                f"{trace} cannot start: the ConfigMap {trace[2]}, which holds the job's code, does not exist"
            ),
            lambda view, trace: (
                f"{view.flk('delete')} and submit again; somebody has deleted the ConfigMap, or the manifests of flk "
                "render were applied without it"
            ),
        ),
        grace=60,
    ),
    Cause(
        "VolumeSourceMissing",
        tell(
            _source_missing(code=False),
            lambda view, trace: (
                f"{trace} cannot start: the {trace[1]} {trace[2]}, which a volume needs, does not exist"
            ),
            lambda view, trace: (
                f"{view.kubectl(f'create {trace[1].lower()} {trace[2]} …')} creates it; the pods start then"
            ),
        ),
        grace=60,
    ),
    Cause(
        "MountFailed",
        tell(
            _unmounted(re.compile(".*")),
            lambda view, trace: f"{trace} cannot start: a volume cannot be mounted: {trace[0]}",
            lambda view, trace: f"{view.kubectl(f'describe pod {trace.pods[0]}')} shows the pod's events",
        ),
        grace=180,
    ),
)
