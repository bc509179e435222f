"""What pods refer to: Secrets, ConfigMaps and PersistentVolumeClaims that are missing or cannot be mounted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from flk.health.cause import Cause, Found, Locate, Match, event_evidence, found_by, tell, waiting
from flk.health.cluster import (
    Cluster,
    Level,
    Pods,
    Result,
    Unreadable,
)
from flk.health.scheduling import is_adding, scheduler_says, unschedulable
from flk.health.starting import CONFIG_ERRORS
from flk.kube import Object
from flk.observe.model import Evidence, PodPhase, PodState
from flk.observe.observation import involved
from flk.observe.pods import SET_UP, after_last, claims_of, one_line
from flk.observe.view import JobView
from flk.spec.units import created_at
from flk.targets.rendezvous import secret_name_of

MISSING: Final = "ReferenceMissing"
_MOUNTED: Final = "which the pods mount"
_PULLS: Final = "with which the image is pulled"
_ABSENT: Final = (
    r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+/)?(\S+)|(secret|configmap) \"([^\"]+)\" not found"
)
_KINDS: Final = {
    "secret": "Secret",
    "configmap": "ConfigMap",
}

_NO_CLAIM: Final = r'persistentvolumeclaim "([^"]+)" (not found|is being deleted)'
_PROVISIONER_WORKS: Final = ("ExternalProvisioning", "Provisioning")
_PROVISIONER_GRACE: Final = 900.0  # seconds: file systems of clouds take up to ten minutes
_PROVISIONER_FAILS_GRACE: Final = 300.0  # seconds: a provisioner tries again after a failure
_MOUNT_FAILURES: Final = ("FailedMount", "FailedAttachVolume")
_NOT_ABSENT: Final = rf"^(?!.*(?:{_ABSENT})).*"  # of messages that ReferenceMissing does not tell
_MULTI_ATTACH: Final = r'Multi-Attach error for volume "([^"]+)"'


def before(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that the objects exist that the pods name: Secrets, ConfigMaps and PersistentVolumeClaims."""
    yield from _check_objects(cluster, pods)
    yield from _check_claims(cluster, pods)


def _check_objects(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that Secrets and ConfigMaps exist: of variables, with their keys, of volumes, and for pulling images."""
    wanted = [(kind, name, key, f"for key {key}") for kind, name, key in pods.keys]
    wanted += [(kind, name, "", _MOUNTED) for kind, name in pods.mounted]
    wanted += [("secrets", name, "", _PULLS) for name in pods.pull_secrets]
    fine: list[str] = []
    for kind, name, key, purpose in wanted:
        what, found = kind.removesuffix("s"), cluster.named.get((kind, name))
        if isinstance(found, Unreadable):
            if found.missing:
                remedy = cluster.commands.kubectl(f"create {_create_command(kind, name, key, purpose)}")
                yield Result(what, Level.FAILED, f"there is no {what} {name} {purpose}", remedy, MISSING)
            else:
                remedy = "the pods may use it all the same"
                yield Result(what, Level.UNKNOWN, f"{what} {name} cannot be read: {found.reason}", remedy)
        elif found is not None:
            keys = {*(found.get("data") or {}), *(found.get("binaryData") or {})}
            if key and key not in keys:
                known = ", ".join(sorted(keys)) or "none"
                remedy = cluster.commands.kubectl(f"edit {what} {name}") + " to add it"
                found_text = f"{what} {name} has no key {key}; its keys: {known}"
                yield Result(what, Level.FAILED, found_text, remedy, MISSING)
            else:
                fine.append(f"{name}:{key}" if key else name)
    if fine:
        yield Result("secret", Level.OK, f"exist: {', '.join(sorted(fine))}")


def _create_command(kind: str, name: str, key: str, purpose: str) -> str:
    if purpose == _MOUNTED:
        return f"{'configmap' if kind == 'configmaps' else 'secret generic'} {name} --from-file=FILE"
    if kind == "configmaps":
        return f"configmap {name} --from-literal={key}=VALUE"
    if key:
        return f"secret generic {name} --from-file={key}=FILE"
    return f"secret docker-registry {name} --docker-server=REGISTRY --docker-username=USER --docker-password=TOKEN"


def _check_claims(cluster: Cluster, pods: Pods) -> Iterator[Result]:
    """Check that the PersistentVolumeClaims exist."""
    fine: list[str] = []
    for name in pods.claims:
        claim = cluster.named.get(("persistentvolumeclaims", name))
        if isinstance(claim, Unreadable):
            create = cluster.commands.kubectl("apply -f claim.yaml")
            remedy = f"create it, with access mode ReadWriteMany for several pods: {create}"
            found, unread = f"there is no PersistentVolumeClaim {name}", f"PersistentVolumeClaim {name} cannot be read"
            yield claim.result("claim", found, remedy, "ClaimMissing", unread=unread)
        elif claim is not None:
            fine.append(name)
    if fine:
        yield Result("claim", Level.OK, f"exist: {', '.join(fine)}")


def _reference_missing(view: JobView, match: Match) -> Found:
    _, key, kind, name, mounted_kind, mounted_name = match.texts
    kind, name = kind or _KINDS[mounted_kind], name or mounted_name
    lacks = f"has no key {key}" if key else f"does not exist in namespace {view.namespace}"
    return match.found(f"{match} cannot start: the {kind} {name} {lacks}", _supply(view, kind, name, key))


def _supply(view: JobView, kind: str, name: str, key: str) -> str:
    """Return how an object or its key comes to be there: flk makes the job's own ones when it creates the job."""
    is_code = kind == "ConfigMap" and view.from_flk and name.startswith((f"{view.name}-", "flk-runtime-", "flk-code-"))
    if is_code or (kind == "Secret" and name == secret_name_of(view.job)):
        return (
            "flk submit makes it before it ends, and the pods start then; if nobody is submitting the job now, "
            f"{view.flk('delete')} and submit it again"
        )
    if key:
        return f"{view.kubectl(f'describe {kind.lower()} {name}')} shows its keys; the pods start once it has the key"
    create = "create secret generic" if kind == "Secret" else "create configmap"
    return f"{view.kubectl(f'{create} {name} --from-literal=KEY=VALUE')} creates it; the pods start then"


def _claim_unbound(view: JobView, match: Match) -> Found:
    claims = claims_of(view.objects[match.pods[0]])
    for name in claims:
        claim = view.seen.claims.get(name)
        phase = str(((claim or {}).get("status") or {}).get("phase") or "Pending")
        if claim is None or phase == "Bound":
            continue
        spec = claim.get("spec") or {}
        storage = str(spec.get("storageClassName") or "")
        text = f"{phase}, storage class {storage or '(none)'}, {', '.join(spec.get('accessModes') or [])}"
        created = created_at(claim)
        about = [
            event
            for event in view.events
            if involved(event).get("kind") == "PersistentVolumeClaim" and involved(event).get("name") == name
        ]
        failures = [e for e in about if e.get("reason") == "ProvisioningFailed"]
        said = (failures or about)[-1:]
        why = one_line(said[0].get("message")) if said else "no volume matches it"
        return match.found(
            f"{match} cannot be scheduled: the PersistentVolumeClaim {name} has no volume (storage class "
            f"{storage or 'none'}): {why}",
            f"{view.kubectl(f'describe persistentvolumeclaim {name}')} shows more; "
            f"{view.kubectl_of_cluster('get storageclasses')} lists "
            "the classes that exist",
            Evidence(f"PersistentVolumeClaim {name}", text, "status.phase", created),
            *map(event_evidence, said),
            grace=_provisioner_grace(about, failures),
        )
    return match.found(
        f"{match} cannot be scheduled: {', '.join(claims) or 'a claim'} has no volume",
        f"{view.kubectl('get persistentvolumeclaims')} shows the claims",
    )


def _provisioner_grace(events: Sequence[Object], failures: Sequence[Object]) -> float | None:
    """Return the seconds that a claim's provisioner gets by the claim's events; None where none works on the claim."""
    if not any(event.get("reason") in _PROVISIONER_WORKS for event in events):
        return None
    return _PROVISIONER_FAILS_GRACE if failures else _PROVISIONER_GRACE


def _on_other_node(view: JobView) -> Found | None:
    """Find pods that may not run where their volume is; not those that have no room on the nodes where they may."""
    closest = None if is_adding(view) else unschedulable(view)
    if closest is None or closest.reason.kind != "volume":
        return None
    match = scheduler_says("volume node affinity conflict|PersistentVolume's node affinity")(view)
    if match is None:
        return None
    return match.found(
        f"{match} cannot be scheduled: the volume of {_claims(view, match) or 'the volume'} belongs to another node or "
        f"zone than the nodes that the pods may run on",
        "use a claim with access mode ReadWriteMany for several pods, or let the pods run on the volume's node; "
        f"{view.kubectl('get persistentvolumeclaims')} shows the access modes",
    )


def _claims(view: JobView, match: Match) -> str:
    """Return the names of the claims that the pods mount; empty if they have none."""
    return ", ".join(claims_of(view.objects[match.pods[0]]))


def _mount_events(view: JobView) -> Iterator[tuple[PodState, Object, str]]:
    """Yield pods whose volumes cannot be mounted, with the last event that says so and its message."""
    for pod in view.pods:
        # A container that waits for another reason has its volumes: events of an earlier failure say nothing of now.
        if pod.phase != PodPhase.STARTING or pod.reason not in ("", *_MOUNT_FAILURES):
            continue
        for event in reversed(after_last(view.events_of(pod.name), SET_UP)):
            text = one_line(event.get("message"))
            # "unmounted volumes" only repeats that something is missing.
            if event.get("reason") in _MOUNT_FAILURES and "timed out waiting" not in text:
                yield pod, event, text
                break


def _unmounted(pattern: str) -> Locate:
    """Return a Locate for the first pod with a volume that cannot be mounted, where the reason matches ``pattern``."""

    def locate(view: JobView) -> Match | None:
        for pod, event, text in _mount_events(view):
            if match := re.search(pattern, text):
                return Match([pod.name], [event_evidence(event)], (match[0], *match.groups("")))
        return None

    return locate


def _attached_elsewhere(view: JobView, match: Match) -> Found:
    return match.found(
        f"{match} cannot start: the volume of {_claims(view, match) or match[1]} is attached to another node and may "
        "be attached to one node only",
        "use a claim with access mode ReadWriteMany, or end the pod that uses the volume: "
        f"{view.kubectl('get pods -o wide')}",
        grace=420,  # in which Kubernetes may detach it
    )


REFERENCES: Final = (
    Cause(
        MISSING,
        # Of variables, or of volumes.
        found_by(
            lambda view: waiting(CONFIG_ERRORS, _ABSENT)(view) or _unmounted(_ABSENT)(view),
            _reference_missing,
        ),
        grace=60,
        awaits="whoever makes a Secret or a ConfigMap, such as cert-manager",
    ),
)
VOLUMES: Final = (
    Cause(
        "ClaimMissing",
        tell(
            scheduler_says(_NO_CLAIM),
            lambda view, match: (
                f"{match} cannot be scheduled: the PersistentVolumeClaim {match[1]} "
                + (match[2] if "deleted" in match[2] else f"does not exist in namespace {view.namespace}")
            ),
            lambda view, match: (
                f"{view.kubectl('get persistentvolumeclaims')} lists those that exist; correct --volume or "
                "--checkpoint, or create the claim"
            ),
        ),
        grace=30,
        awaits="whoever makes the claim",
    ),
    Cause(
        "ClaimUnbound",
        found_by(scheduler_says("unbound immediate PersistentVolumeClaims"), _claim_unbound),
        grace=60,
        awaits="the provisioner of volumes",
    ),
    Cause(
        "VolumeOnOtherNode",
        lambda view: _on_other_node(view) or found_by(_unmounted(_MULTI_ATTACH), _attached_elsewhere)(view),
        grace=60,
        awaits="a volume that another node has",
    ),
    Cause(
        "MountFailed",
        tell(
            _unmounted(_NOT_ABSENT),
            lambda view, match: f"{match} cannot start: a volume cannot be mounted: {match[0]}",
            lambda view, match: f"{view.kubectl(f'describe pod {match.pods[0]}')} shows the pod's events",
        ),
        grace=180,
        awaits="the driver of a volume",
    ),
)
