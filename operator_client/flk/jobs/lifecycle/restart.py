"""Restart a job: the same job runs anew from its last checkpoint, with new pods and no restarts used.

A job that has not ended is suspended and resumed. No controller starts a job again that has ended, so
such a job is deleted, and created from its own manifests. The API server checks these before. So is a job that has to
avoid further nodes: pods that are made later do not follow a change of most templates.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from flk.errors import ApiError, FlkError, UsageError
from flk.jobs.lifecycle.creation import check_on_server, create_job
from flk.jobs.lifecycle.deletion import delete_jobs
from flk.jobs.lifecycle.suspension import (
    AGAIN,
    end_of,
    loses_checkpoints,
    queue_of,
    refuse_deleted,
    refuse_incomplete,
    refuse_to_lose,
    set_suspended,
    stopping_hint,
    wait_for_pods_to_end,
)
from flk.kube import Object
from flk.observe.client import JobClient, JobRef
from flk.observe.reader import view_job
from flk.observe.resources import CONFIG_MAPS, POD_GROUPS, SERVICES
from flk.spec import labels
from flk.targets import target_of
from flk.targets.gang import gang_of
from flk.targets.model import is_owner
from flk.targets.rendezvous import environments, name_secret
from flk.user.files import state_folder, write_whole
from flk_runtime.contract import pod_env

_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
_KEPT_METADATA: Final = ("name", "namespace", "labels", "annotations")
_KEPT_OF_SERVICE: Final = ("clusterIP", "publishNotReadyAddresses", "selector", "ports")
_NOT_KEPT_ANNOTATION: Final = "kubectl.kubernetes.io/last-applied-configuration"


def restart(
    client: JobClient,
    name: str,
    *,
    timeout: float | None,
    report: Callable[[str], None],
    avoid: Sequence[str] = (),
    lose_progress: bool = False,
) -> str:
    """Run a job anew and return its UID, which is a new one if the job was created again.

    Its pods avoid the nodes ``avoid``. ``report`` is called with a line while flk waits for pods to end, and with what
    the job loses. Raises WaitTimeoutError if they do not end within ``timeout`` seconds; a job that had not ended
    is suspended then. Raises UsageError for a job in a queue, for ``avoid`` if flk cannot give
    the pods other nodes, and if the job loses progress without ``lose_progress``, JobNotFoundError if there is no job.
    """
    job = client.get_job(name)
    if avoid and not target_of(job).pod_specs(job):
        raise UsageError(
            f"the pods of this {job['kind']} cannot be given other nodes: flk has not made it",
            hint="delete it, change the affinity in its own manifest, and create it anew",
        )
    view = view_job(client, name)
    placed = avoiding(job, avoid)
    if queue_of(job):  # of one that has ended, Kueue has changed the pods in ways that are not undone
        again = f"{client.commands.flk('delete', name)}, and submit it again" if end_of(job) else stopping_hint(client)
        raise UsageError(f"job {name} is in queue {queue_of(job)}: Kueue decides when it runs", hint=again)
    if end_of(job):
        if loses_checkpoints(job):
            report(f"the checkpoints of job {name} were in the memory of its pods, which have ended: {AGAIN}")
        return _recreate(client, placed, timeout, report)
    refuse_deleted(client, job)
    refuse_incomplete(client, job)
    refuse_to_lose(view, lose_progress, report)
    if placed != job:  # no controller moves pods that exist, and only one reads a template that has changed
        return _recreate(client, placed, timeout, report)
    try:
        if not target_of(job).suspended(job):
            set_suspended(client, job, True)
            wait_for_pods_to_end(client, job, timeout=timeout, report=report)
    except UsageError:  # it ended before its controller saw the field: nothing starts it again
        return _recreate(client, job, timeout, report)
    except FlkError as error:
        error.hint = f"this starts it again: {client.commands.flk('resume', name)}"
        raise
    set_suspended(client, job, False)
    return str(job["metadata"]["uid"])


def avoiding(job: Object, nodes: Sequence[str]) -> Object:
    """Return a job whose pods avoid ``nodes``: each term, of which a node must fulfil one, leaves them out."""
    placed = copy.deepcopy(job)
    added = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    for spec in target_of(placed).pod_specs(placed) if nodes else []:
        affinity = spec["affinity"] = spec.get("affinity") or {}
        of_nodes = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
        required = of_nodes[_REQUIRED] = of_nodes.get(_REQUIRED) or {}
        for term in required.setdefault("nodeSelectorTerms", [{}]):
            fields = term.get("matchFields") or []
            term["matchFields"] = [*fields, *(field for field in added if field not in fields)]
    return placed


def _recreate(client: JobClient, job: Object, timeout: float | None, report: Callable[[str], None]) -> str:
    """Delete a job, and create it again. Its manifests are in a file in between.

    The name has to be free before the new job can have it, so for a moment there is neither. Whatever ends flk in that
    moment must not cost the user the job: so the server checks the manifests first, and they are on disk until the new
    job exists.
    """
    name = job["metadata"]["name"]
    own = _manifest(job, new_submission=True)
    _say_restarted(own["spec"])
    name_secret(own)  # as for a job that kubectl creates, which the file is for
    manifests = [own, *map(_manifest, _owned_by(client, job))]
    try:
        check_on_server(client, manifests)
    except ApiError as error:
        if "exceeded quota" not in str(error):  # the job that is there may count in the quota
            raise
    # From the deletion to the creation the job exists in this file only.
    path = _write(client, name, manifests)
    # The file creates another submission than flk does: create_job takes what has its own for its own.
    own["metadata"]["annotations"][labels.SUBMISSION] = str(uuid.uuid4())
    name_secret(own)
    try:
        seen = JobRef(name, target_of(job), job["metadata"]["uid"])
        for _, result in delete_jobs(client, [seen], wait=True, timeout=timeout, report=report):
            if isinstance(result, FlkError):
                raise result
        created = create_job(client, manifests)
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
        made["spec"].get("runPolicy", made["spec"]).pop("suspend", None)
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
