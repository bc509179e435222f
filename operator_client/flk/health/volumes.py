"""Causes of pods whose volumes are missing or cannot be mounted."""

from __future__ import annotations

import re
from typing import Final

from flk.health.cause import Cause, Found, event_evidence, names, subject
from flk.health.scheduler_message import parse
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.view import JobView, pod_spec
from flk.units import timestamp

_CLAIM_MISSING: Final = re.compile(r'persistentvolumeclaim "([^"]+)" not found')
_CLAIM_DELETED: Final = re.compile(r'persistentvolumeclaim "([^"]+)" is being deleted')
_OTHER_NODE: Final = ("volume node affinity conflict", "PersistentVolume's node affinity")
_MULTI_ATTACH: Final = re.compile(r'Multi-Attach error for volume "([^"]+)"(.*)')
_MOUNT_KEY: Final = re.compile(r"references non-existent (?:config|secret) key: (\S+)")
_MOUNT_OBJECT: Final = re.compile(r'(configmap|secret) "([^"]+)" not found')


def _unscheduled(view: JobView) -> list[PodState]:
    return [pod for pod in view.pods if pod.phase == PodPhase.PENDING and pod.message]


def _scheduling_evidence(view: JobView, pod: PodState) -> Evidence:
    status = view.objects[pod.name].get("status") or {}
    condition: Object = next((c for c in status.get("conditions") or [] if c.get("type") == "PodScheduled"), {})
    time = timestamp(condition.get("lastTransitionTime"))
    return Evidence(f"pod {pod.name}", pod.message, "status.conditions[PodScheduled]", time)


def _claims(view: JobView, pod: PodState) -> list[str]:
    volumes = pod_spec(view.objects[pod.name]).get("volumes") or []
    found = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes]
    return [str(name) for name in found if name]


def _claim_missing(view: JobView) -> Found | None:
    pods = [pod for pod in _unscheduled(view) if _CLAIM_MISSING.search(pod.message)]
    if not pods:
        return None
    name = _CLAIM_MISSING.findall(pods[0].message)[0]
    return Found(
        f"{subject(pods)} cannot be scheduled: the PersistentVolumeClaim {name} does not exist in namespace "
        f"{view.namespace}",
        f"{view.kubectl('get persistentvolumeclaims')} lists those that exist; correct --volume or --checkpoint, or "
        "create the claim",
        [_scheduling_evidence(view, pods[0])],
        names(pods),
    )


def _claim_deleted(view: JobView) -> Found | None:
    pods = [pod for pod in _unscheduled(view) if _CLAIM_DELETED.search(pod.message)]
    if not pods:
        return None
    name = _CLAIM_DELETED.findall(pods[0].message)[0]
    return Found(
        f"{subject(pods)} cannot be scheduled: the PersistentVolumeClaim {name} is being deleted",
        f"{view.kubectl(f'describe persistentvolumeclaim {name}')} shows what still uses it",
        [_scheduling_evidence(view, pods[0])],
        names(pods),
    )


def _claim_unbound(view: JobView) -> Found | None:
    pods = [pod for pod in _unscheduled(view) if "unbound immediate PersistentVolumeClaims" in pod.message]
    if not pods:
        return None
    evidence = [_scheduling_evidence(view, pods[0])]
    for name in _claims(view, pods[0]):
        claim = view.around.claims.get(name)
        if claim is None or (claim.get("status") or {}).get("phase") == "Bound":
            continue
        storage = str((claim.get("spec") or {}).get("storageClassName") or "")
        modes = ", ".join((claim.get("spec") or {}).get("accessModes") or [])
        created = timestamp(claim["metadata"].get("creationTimestamp"))
        phase = str((claim.get("status") or {}).get("phase") or "Pending")
        text = f"{phase}, storage class {storage or '(none)'}, {modes}"
        evidence.append(Evidence(f"PersistentVolumeClaim {name}", text, "status.phase", created))
        said = [e for e in view.events if (e.get("involvedObject") or {}).get("name") == name and _is_about_claim(e)]
        evidence += [event_evidence(event) for event in said[-1:]]
        why = " ".join(str(said[-1].get("message", "")).split()) if said else "no volume matches it"
        return Found(
            f"{subject(pods)} cannot be scheduled: the PersistentVolumeClaim {name} has no volume (storage class "
            f"{storage or 'none'}): {why}",
            f"{view.kubectl(f'describe persistentvolumeclaim {name}')} shows more; kubectl get storageclasses "
            "lists the "
            "classes that exist",
            evidence,
            names(pods),
        )
    claims = ", ".join(_claims(view, pods[0])) or "a claim"
    return Found(
        f"{subject(pods)} cannot be scheduled: {claims} has no volume",
        f"{view.kubectl('get persistentvolumeclaims')} shows the claims",
        evidence,
        names(pods),
    )


def _is_about_claim(event: Object) -> bool:
    return (event.get("involvedObject") or {}).get("kind") == "PersistentVolumeClaim"


def _volume_on_other_node(view: JobView) -> Found | None:
    pods = [pod for pod in _unscheduled(view) if any(words in pod.message for words in _OTHER_NODE)]
    if not pods or (parse(pods[0].message)[:1] and parse(pods[0].message)[0].kind == "resource"):
        return None
    claims = ", ".join(_claims(view, pods[0])) or "the volume"
    return Found(
        f"{subject(pods)} cannot be scheduled: the volume of {claims} belongs to another node or zone than the nodes "
        "that "
        "the pods may run on",
        f"use a claim with access mode ReadWriteMany for several pods, or let the pods run on the volume's node; "
        f"{view.kubectl('get persistentvolumeclaims')} shows the access modes",
        [_scheduling_evidence(view, pods[0])],
        names(pods),
    )


def _mount_events(view: JobView) -> list[tuple[PodState, Object, str]]:
    """Return pods whose volumes cannot be mounted, with the last event that says so and its message."""
    found = []
    for pod in view.pods:
        if pod.phase != PodPhase.STARTING:
            continue
        for event in reversed(view.pod_events.get(pod.name, [])):
            text = " ".join(str(event.get("message", "")).split())
            # "unmounted volumes" only repeats that something is missing.
            if event.get("reason") in ("FailedMount", "FailedAttachVolume") and "timed out waiting" not in text:
                found.append((pod, event, text))
                break
    return found


def _starting(view: JobView) -> list[PodState]:
    return [pod for pod in view.pods if pod.phase == PodPhase.STARTING and pod.reason in ("FailedMount", "")]


def _multi_attach(view: JobView) -> Found | None:
    for pod, event, text in _mount_events(view):
        match = _MULTI_ATTACH.search(text)
        if match:
            claims = ", ".join(_claims(view, pod)) or match[1]
            return Found(
                f"{pod.name} cannot start: the volume of {claims} is attached to another node and may be attached to "
                "one "
                "node only",
                f"use a claim with access mode ReadWriteMany, or end the pod that uses the volume: "
                f"{view.kubectl('get pods -o wide')}",
                [event_evidence(event)],
                [pod.name],
            )
    return None


def _code_not_mounted(view: JobView) -> Found | None:
    return _missing_mount(view, code=True)


def _object_not_mounted(view: JobView) -> Found | None:
    return _missing_mount(view, code=False)


def _missing_mount(view: JobView, *, code: bool) -> Found | None:
    for pod, event, text in _mount_events(view):
        match = _MOUNT_OBJECT.search(text)
        if not match:
            continue
        kind = "ConfigMap" if match[1] == "configmap" else "Secret"
        if (kind == "ConfigMap" and view.from_flk and match[2].startswith(view.name)) != code:
            continue
        pods = [other.name for other in _starting(view)] or [pod.name]
        words = pod.name + (f" and {len(pods) - 1} other pods" if len(pods) > 2 else "")
        if code:
            return Found(
                f"{words} cannot start: the ConfigMap {match[2]}, which holds the job's code, does not exist",
                f"{view.flk('delete')} and submit again; somebody has deleted the ConfigMap, or the manifests of "
                "flk render "
                "were applied without it",
                [event_evidence(event)],
                pods,
            )
        return Found(
            f"{words} cannot start: the {kind} {match[2]}, which a volume needs, does not exist",
            f"{view.kubectl(f'create {kind.lower()} {match[2]} …')} creates it; the pods start then",
            [event_evidence(event)],
            pods,
        )
    return None


def _mount_failed(view: JobView) -> Found | None:
    for pod, event, text in _mount_events(view):
        return Found(
            f"{pod.name} cannot start: a volume cannot be mounted: {text}",
            f"{view.kubectl(f'describe pod {pod.name}')} shows the pod's events",
            [event_evidence(event)],
            [pod.name],
        )
    return None


_SCHEDULED: Final = "flk reads the condition PodScheduled of the pods, and the claims that they name."
_MOUNTED: Final = "flk reads the events FailedMount and FailedAttachVolume of the pods."
VOLUMES: Final = (
    Cause(
        "ClaimMissing",
        "A PersistentVolumeClaim does not exist",
        f"The pods name a claim that the namespace does not have. {_SCHEDULED}",
        "Correct --volume or --checkpoint, or create the claim. The pods are scheduled once it exists.",
        _claim_missing,
        grace=30,
    ),
    Cause(
        "ClaimBeingDeleted",
        "A PersistentVolumeClaim is being deleted",
        f"The pods name a claim that somebody deletes. {_SCHEDULED}",
        "Name another claim.",
        _claim_deleted,
        grace=30,
    ),
    Cause(
        "ClaimUnbound",
        "A PersistentVolumeClaim has no volume",
        "The claim exists, and no volume is bound to it: its storage class may not exist, or may have no room. "
        f"{_SCHEDULED} "
        "The events of the claim say why.",
        "Correct the storage class of the claim, or have a volume provided.",
        _claim_unbound,
        grace=60,
    ),
    Cause(
        "VolumeOnOtherNode",
        "A volume belongs to another node or zone",
        f"The volume can be used on some nodes only, and the pods may not or do not fit there. {_SCHEDULED}",
        "Use a claim with access mode ReadWriteMany, or let the pods run where the volume is.",
        _volume_on_other_node,
        grace=60,
    ),
    Cause(
        "VolumeAttachedElsewhere",
        "A volume is attached to another node",
        f"The volume's access mode allows one node at a time, and another node has it. {_MOUNTED} After a node was "
        "lost, the "
        "volume may stay attached to it for minutes.",
        "Use ReadWriteMany for several pods, or end the pod that has the volume.",
        _multi_attach,
        grace=420,
    ),
    Cause(
        "CodeNotMounted",
        "The ConfigMap with the job's code does not exist",
        "flk ships the code in ConfigMaps that belong to the job. Without them the pods wait for their volume. "
        f"{_MOUNTED}",
        "Delete the job and submit it again, or apply all manifests that `flk render` prints.",
        _code_not_mounted,
        grace=60,
    ),
    Cause(
        "VolumeSourceMissing",
        "A volume needs a Secret or ConfigMap that does not exist",
        f"A volume of the pods is made of a Secret or ConfigMap that the namespace does not have. {_MOUNTED}",
        "Create the object. The pods start once it exists.",
        _object_not_mounted,
        grace=60,
    ),
    Cause(
        "MountFailed",
        "A volume cannot be mounted",
        f"The node gives a reason that flk does not know more about. {_MOUNTED}",
        "Read the event.",
        _mount_failed,
        grace=180,
    ),
)
