"""Checks of the objects that a job names: secrets, claims, service account, priority class, queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from flk import labels
from flk.health.facts import Facts, Level, Pods, Result, Unreadable
from flk.kube import Object
from flk.units import plural

_ONE_NODE: Final = "ReadWriteOnce"
_ONE_POD: Final = "ReadWriteOncePod"
_READ_ONLY: Final = "ReadOnlyMany"
_WAITS: Final = "WaitForFirstConsumer"


def names_of(pods: Pods) -> list[tuple[str, str]]:
    """Return kind (in plural) and name of every object that the job's pods name."""
    found = [("serviceaccounts", pods.service_account)]
    found += [("persistentvolumeclaims", name) for name in pods.claims]
    found += [("secrets", name) for name in pods.pull_secrets]
    found += [(kind, name) for kind, name, _ in pods.keys]
    if pods.priority_class:
        found.append(("priorityclasses", pods.priority_class))
    if queue := queue_name(pods):
        found.append(("localqueues", queue))
    return sorted(set(found))


def queue_name(pods: Pods) -> str:
    """Return the name of the job's Kueue queue; empty for none."""
    return str((pods.manifest["metadata"].get("labels") or {}).get(labels.QUEUE) or "")


def check_secrets(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check that the Secrets and ConfigMaps of the environment exist and have the keys, and that pull secrets exist."""
    wanted = [(kind, name, key) for kind, name, key in pods.keys]
    wanted += [("secrets", name, "") for name in pods.pull_secrets]
    fine: list[str] = []
    for kind, name, key in wanted:
        what, found = kind.removesuffix("s"), facts.named.get((kind, name))
        if isinstance(found, Unreadable):
            if found.missing:
                purpose = f"for key {key}" if key else "with which the image is pulled"
                remedy = facts.command(f"create {_create_command(kind, name, key)}")
                yield Result(what, Level.FAILED, f"there is no {what} {name} {purpose}", remedy)
            else:
                remedy = "the pods may use it all the same"
                yield Result(what, Level.UNKNOWN, f"{what} {name} cannot be read: {found.reason}", remedy)
        elif found is not None:
            keys = {*(found.get("data") or {}), *(found.get("binaryData") or {})}
            if key and key not in keys:
                known = ", ".join(sorted(keys)) or "none"
                remedy = facts.command(f"edit {what} {name}") + " to add it"
                yield Result(what, Level.FAILED, f"{what} {name} has no key {key}; its keys: {known}", remedy)
            else:
                fine.append(f"{name}:{key}" if key else name)
    if fine:
        yield Result("secret", Level.OK, f"exist: {', '.join(sorted(fine))}")


def _create_command(kind: str, name: str, key: str) -> str:
    if kind == "configmaps":
        return f"configmap {name} --from-literal={key}=VALUE"
    if key:
        return f"secret generic {name} --from-file={key}=FILE"
    return f"secret docker-registry {name} --docker-server=REGISTRY --docker-username=USER --docker-password=TOKEN"


def check_claims(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check that the claims exist, are or will be bound, and can be mounted by all pods."""
    fine: list[str] = []
    for name in pods.claims:
        claim = facts.named.get(("persistentvolumeclaims", name))
        if isinstance(claim, Unreadable):
            if claim.missing:
                remedy = "create it, with access mode ReadWriteMany for several pods: kubectl apply -f claim.yaml"
                yield Result("claim", Level.FAILED, f"there is no PersistentVolumeClaim {name}", remedy)
            else:
                yield Result("claim", Level.UNKNOWN, f"PersistentVolumeClaim {name} cannot be read: {claim.reason}")
        elif claim is not None:
            problems = list(_claim_problems(facts, pods, name, claim))
            yield from problems
            if not problems:
                modes = ", ".join(claim["spec"].get("accessModes") or [])
                fine.append(f"{name} ({modes})")
    if fine:
        yield Result("claim", Level.OK, f"exist: {', '.join(fine)}")


def _claim_problems(facts: Facts, pods: Pods, name: str, claim: Object) -> Iterator[Result]:
    what = f"PersistentVolumeClaim {name}"
    modes: Sequence[str] = claim["spec"].get("accessModes") or []
    many = "use a claim with access mode ReadWriteMany, or --replicas 1"
    if claim["metadata"].get("deletionTimestamp"):
        yield Result("claim", Level.FAILED, f"{what} is being deleted", "use another claim")
    phase = (claim.get("status") or {}).get("phase")
    if phase == "Lost":
        yield Result("claim", Level.FAILED, f"{what} has lost its volume", facts.command(f"describe pvc {name}"))
    if phase == "Pending" and not _waits_for_pod(facts, claim):
        remedy = facts.command(f"describe pvc {name}") + " shows why"
        yield Result("claim", Level.WARNING, f"{what} is not bound to a volume yet; pods wait for it", remedy)
    if pods.count > 1 and list(modes) == [_ONE_POD]:
        found = f"{what} can be mounted by one pod only ({_ONE_POD}), and the job has {pods.count}"
        yield Result("claim", Level.FAILED, found, many)
    elif pods.count > 1 and _ONE_NODE in modes and not {"ReadWriteMany", _READ_ONLY} & set(modes):
        found = f"{what} can be mounted on one node at a time only ({_ONE_NODE}), and the job has {pods.count} pods"
        yield Result("claim", Level.WARNING, found, many)
    elif modes and set(modes) <= {_READ_ONLY} and _written(pods, name):
        yield Result("claim", Level.FAILED, f"{what} is read-only ({_READ_ONLY}), and checkpoints go to it", many)


def _waits_for_pod(facts: Facts, claim: Object) -> bool:
    """Return whether the claim's volume is made only when a pod uses it; also where the class cannot be read."""
    storage_class = facts.named.get(("storageclasses", str(claim["spec"].get("storageClassName") or "")))
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
        folder = next(
            (str(v.get("value")) for v in container.get("env") or [] if v.get("name") == "FLK_CHECKPOINT"), ""
        )
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") in volumes and folder.startswith(str(mount.get("mountPath")) + "/"):
                return True
    return False


def check_service_account(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check that the pods' ServiceAccount exists."""
    found = facts.named.get(("serviceaccounts", pods.service_account))
    if isinstance(found, Unreadable) and found.missing:
        remedy = facts.command(f"create serviceaccount {pods.service_account}")
        sentence = f"there is no ServiceAccount {pods.service_account}, so no pod is created"
        yield Result("service account", Level.FAILED, sentence, remedy)


def check_priority_class(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check that the pods' PriorityClass exists."""
    found = facts.named.get(("priorityclasses", pods.priority_class))
    if isinstance(found, Unreadable):
        if found.missing:
            remedy = facts.command("get priorityclasses").partition(" -n ")[0] + " lists those that exist"
            sentence = f"there is no PriorityClass {pods.priority_class}, so no pod is created"
            yield Result("priority", Level.FAILED, sentence, remedy)
        else:
            yield Result(
                "priority", Level.UNKNOWN, f"PriorityClass {pods.priority_class} cannot be read: {found.reason}"
            )
    elif found is not None:
        value = found.get("value", 0)
        yield Result("priority", Level.OK, f"PriorityClass {pods.priority_class} exists, with the value {value}")


def check_queue(facts: Facts, pods: Pods) -> Iterator[Result]:
    """Check that the Kueue queue exists and admits jobs."""
    name = queue_name(pods)
    found = facts.named.get(("localqueues", name))
    if isinstance(found, Unreadable):
        if found.missing:
            remedy = facts.command("get localqueues") + " lists those that exist"
            sentence = f"there is no queue {name} (a LocalQueue of Kueue) in namespace {facts.namespace}"
            yield Result("queue", Level.FAILED, sentence, remedy)
        else:
            yield Result("queue", Level.UNKNOWN, f"queue {name} cannot be read: {found.reason}")
    elif found is not None:
        conditions = {c.get("type"): c for c in (found.get("status") or {}).get("conditions") or []}
        active = conditions.get("Active") or {}
        if active.get("status") == "False":
            remedy = facts.command(f"describe localqueue {name}")
            sentence = (
                f"queue {name} admits no jobs now: {active.get('message') or active.get('reason') or 'not active'}"
            )
            yield Result("queue", Level.FAILED, sentence, remedy)
        else:
            waiting = (found.get("status") or {}).get("pendingWorkloads", 0)
            yield Result("queue", Level.OK, f"queue {name} exists; {plural(int(waiting or 0), 'job')} wait in it")
