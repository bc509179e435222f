"""Restart a job: the same job runs anew from its last checkpoint, with new pods and no restarts used.

A job that has not ended is suspended and resumed. No controller starts a job again that has ended, so
such a job is deleted, and created from its own manifests. The API server checks these before. So is a job that has to
avoid further nodes, where pods that are made later do not follow a change of its template.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from flk import labels
from flk.errors import ApiError, FlkError, UsageError
from flk.jobs.lifecycle.creation import OwnedObjects, check_on_server, create_job
from flk.jobs.lifecycle.deletion import delete_jobs
from flk.jobs.lifecycle.ending import refuse_to_lose
from flk.jobs.lifecycle.placement import avoiding, place, quarantined, refuse_other_nodes, report_absent
from flk.jobs.lifecycle.suspension import (
    end_of,
    is_suspended,
    queue_of,
    refuse_incomplete,
    set_suspended,
    stopping_hint,
    wait_for_pods_to_end,
)
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.reader import view_job
from flk.observe.resources import CONFIG_MAPS, POD_GROUPS, SERVICES, WORKLOADS
from flk.targets import target_of
from flk.targets.gang import gang_of
from flk.targets.model import is_owner
from flk.targets.rendezvous import environments, name_secret
from flk.user_files import state_folder, write_whole
from flk_runtime.contract import pod_env

_KEPT_METADATA: Final = ("name", "namespace", "labels", "annotations")
# What Kueue adds to a pod template for the nodes that it has chosen, and the prefixes of its labels and annotations.
_INJECTED: Final = ("nodeSelector", "tolerations", "schedulingGates")
_INJECTED_KEYS: Final = ("kueue.x-k8s.io/", "autoscaling.x-k8s.io/", "cluster-autoscaler.kubernetes.io/")
_KEPT_OF_SERVICE: Final = ("clusterIP", "publishNotReadyAddresses", "selector", "ports")
_NOT_KEPT_ANNOTATION: Final = "kubectl.kubernetes.io/last-applied-configuration"


def restart(
    client: JobClient,
    name: str,
    *,
    timeout: float | None,
    report: Callable[[str], None],
    objects_with_uid: OwnedObjects = lambda job: (),
    avoid: Sequence[str] = (),
    lose_progress: bool = False,
) -> str:
    """Run a job anew and return its UID, which is a new one if the job was created again.

    Its pods avoid the nodes ``avoid``, and nodes in quarantine where others have room. ``objects_with_uid`` makes the
    objects that need the UID of a new job. ``report`` is called with a line while flk waits for pods to end. Raises
    WaitTimeoutError if they do not within ``timeout`` seconds; a job that had not ended is suspended then. Raises
    UsageError for a job in a queue that has not ended, for ``avoid`` if flk cannot give the pods other nodes, and if
    the job loses progress without ``lose_progress``, JobNotFoundError if there is no job.
    """
    job = client.get_job(name)
    if avoid and not target_of(job).pod_specs(job):
        _refuse_other_nodes(client, job, avoid)
    report_absent(client, avoid, report)
    view = view_job(client, name)
    placed = avoiding(job, avoid, quarantined(view, report))
    if end_of(job):
        return _recreate(client, placed, objects_with_uid, timeout, report)
    if queue_of(job):
        raise UsageError(
            f"job {name} is in queue {queue_of(job)} and has not ended: Kueue decides when it runs",
            hint=stopping_hint(client),
        )
    refuse_incomplete(client, job)
    refuse_to_lose(view, lose_progress, report)
    if placed != job and not target_of(job).placeable:
        return _recreate(client, placed, objects_with_uid, timeout, report)
    try:
        if not is_suspended(job):
            set_suspended(client, job, True)
            wait_for_pods_to_end(client, job, timeout=timeout, report=report)
    except UsageError:  # it ended before it noticed
        return _recreate(client, placed, objects_with_uid, timeout, report)
    except (FlkError, KeyboardInterrupt) as error:
        if isinstance(error, FlkError):
            error.hint = f"this starts it again: {client.commands.flk('resume', name)}"
        raise
    place(client, job, placed)
    set_suspended(client, job, False)
    return str(job["metadata"]["uid"])


def _refuse_other_nodes(client: JobClient, job: Object, nodes: Sequence[str]) -> NoReturn:
    """Raise UsageError: nothing that flk may change in this job holds the affinity of its pods."""
    try:
        refuse_other_nodes(client, job, nodes)
    except UsageError as error:
        error.hint = "flk has not made it: delete it, change the affinity in its own manifest, and create it anew"
        raise


def _recreate(
    client: JobClient,
    job: Object,
    objects_with_uid: OwnedObjects,
    timeout: float | None,
    report: Callable[[str], None],
) -> str:
    """Delete a job, and create it again. Its manifests are in a file in between.

    The name has to be free before the new job can have it, so for a moment there is neither. Whatever ends flk in that
    moment must not cost the user the job: so the server checks the manifests first, and they are on disk until the new
    job exists.
    """
    name = job["metadata"]["name"]
    own = _manifest(_as_queued(client, job, report), new_submission=True)
    _say_restarted(own["spec"])
    name_secret(own)  # as for a job that kubectl creates, which the file is for
    manifests = [own, *map(_manifest, _owned_by(client, job))]
    try:
        check_on_server(client, manifests)
    except ApiError as error:
        if "exceeded quota" not in str(error):  # the job that is there may count in the quota
            raise
    path = _write(client, name, manifests)
    # The file creates another submission than flk does: create_job takes what has its own for its own.
    own["metadata"]["annotations"][labels.SUBMISSION] = str(uuid.uuid4())
    name_secret(own)
    try:
        seen = JobRef(name, target_of(job), job["metadata"]["uid"])
        for _, result in delete_jobs(client, [seen], wait=True, timeout=timeout, report=report):
            if isinstance(result, FlkError):
                raise result
        created = create_job(client, manifests, objects_with_uid)
    except (FlkError, KeyboardInterrupt) as error:
        command = client.commands.kubectl(f"create -f {path}")
        kept = f"its manifests are kept; if the job is gone, this creates it again, without a Secret: {command}"
        if isinstance(error, FlkError):
            error.hint = kept
        else:
            report(kept)
        raise
    path.unlink(missing_ok=True)
    return str(created["metadata"]["uid"])


def _as_queued(client: JobClient, job: Object, report: Callable[[str], None]) -> Object:
    """Return the job with the pod templates that it had before Kueue admitted it, which its Workload has.

    Kueue takes back its additions when it stops a job, and not when the job ends.
    """
    if not queue_of(job):
        return job
    try:
        selector = {"labelSelector": f"{labels.KUEUE_JOB_UID}={job['metadata']['uid']}"}
        workloads = client.api.list_all(client.target(WORKLOADS), selector)[0]
    except ApiError:
        workloads = []
    if not workloads:
        report("its Workload cannot be read, so the nodes that Kueue has chosen for it are kept")
        return job
    job = copy.deepcopy(job)
    for role, pods in zip(target_of(job).replicas(job).values(), workloads[0]["spec"]["podSets"], strict=False):
        before, now = pods["template"], role.template
        for key in _INJECTED:
            now["spec"].pop(key, None)
            if before["spec"].get(key):
                now["spec"][key] = before["spec"][key]
        for part in ("labels", "annotations"):
            found, given = ((template.get("metadata") or {}).get(part) or {} for template in (now, before))
            for key in [key for key in found if key.startswith(_INJECTED_KEYS) and key not in given]:
                del found[key]
    return job


def _owned_by(client: JobClient, job: Object) -> list[Object]:
    """Return the objects that the job owns, but Secrets. Raises FlkError: without its code it could not run."""
    kinds = []
    if target_of(job).name == "job":
        kinds.append((SERVICES, "Service"))
    if gang := gang_of(job):
        kinds.append((POD_GROUPS[gang.group], "PodGroup"))
    selector = f"{labels.JOB}={job['metadata']['name']}"
    owned = [
        {**code, "apiVersion": "v1", "kind": "ConfigMap"}
        for name in _mounted(job)
        if (code := client.find(CONFIG_MAPS, name)) and is_owner(job["metadata"]["uid"], code)
    ]
    for resource, kind in kinds:
        found = client.api.list_all(client.target(resource), {"labelSelector": selector})[0]
        own = [item for item in found if is_owner(job["metadata"]["uid"], item)]
        # Objects of a list have neither.
        owned += [{**item, "apiVersion": resource.api_version, "kind": kind} for item in own]
    return sorted(owned, key=lambda item: (item["kind"], str(item["metadata"]["name"])))


def _say_restarted(spec: Object) -> None:
    """Set the variable of a job that is created again in all of its containers that have --on-restart."""
    for variables in environments(spec):
        names = [each.get("name") for each in variables]
        if pod_env.ON_RESTART in names and pod_env.RESTARTED not in names:
            variables.append({"name": str(pod_env.RESTARTED), "value": "yes"})


def _mounted(job: Object) -> list[str]:
    """Return the names of the ConfigMaps that make up the volumes of a job's pods."""
    specs = [role.template.get("spec") or {} for role in target_of(job).replicas(job).values()]
    volumes = [volume for spec in specs for volume in spec.get("volumes") or []]
    sources = [source for volume in volumes for source in (volume.get("projected") or {}).get("sources") or []]
    return [source["configMap"]["name"] for source in sources if "configMap" in source]


def _manifest(item: Object, new_submission: bool = False) -> Object:
    """Return an object as it was created: without its status and without the fields that the API server has added."""
    made = {key: copy.deepcopy(value) for key, value in item.items() if key not in ("metadata", "status")}
    metadata = {key: copy.deepcopy(item["metadata"][key]) for key in _KEPT_METADATA if key in item["metadata"]}
    annotations: dict[str, Any] = metadata.get("annotations") or {}
    annotations.pop(_NOT_KEPT_ANNOTATION, None)
    if new_submission:
        if owners := item["metadata"].get("ownerReferences"):
            metadata["ownerReferences"] = owners
        annotations.pop(labels.SUBMISSION, None)
        metadata["annotations"] = annotations
        if not queue_of(item):
            policy = made["spec"].get("runPolicy", made["spec"])
            policy.pop("suspend", None)
        for role in target_of(made).replicas(made).values():
            ((role.template.get("metadata") or {}).get("annotations") or {}).pop(labels.STARTED, None)
    if made["kind"] == "Service":
        made["spec"] = {key: made["spec"][key] for key in _KEPT_OF_SERVICE if key in made["spec"]}
    return target_of(made).recreatable({**made, "metadata": metadata})


def _write(client: JobClient, name: str, manifests: list[Object]) -> Path:
    """Write manifests to a file of the user's state folder that only this user may read."""
    path = state_folder() / "restarts" / f"{client.namespace}-{name}-{uuid.uuid4().hex[:8]}.json"
    try:
        write_whole(path, json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}).encode())
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}), and a job that has ended is deleted before it runs again",
            hint="set XDG_STATE_HOME to a folder that you can write",
        ) from None
    return path
