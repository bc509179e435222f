"""Create a job with all its objects, so that no pod starts before all of them exist.

The job is created suspended, and marked as incomplete. Then come the objects that it owns. The last request
releases it. A submission that is killed in between leaves a suspended job, which has no pods and holds no node.

Archives of code are stored once in a namespace, for all jobs with the same. Each job is one of their owners, and
Kubernetes deletes them with the last. It may do so while a job becomes an owner, so flk looks again before the release.
"""

from __future__ import annotations

import copy
import secrets
import time
from collections.abc import Sequence
from typing import Final

from flk.errors import ApiError, ConflictError, FlkError, ForbiddenError, JobNotFoundError, MissingApiError
from flk.health.admission import lacks_dry_run
from flk.jobs.lifecycle.suspension import change_job, merge, starting
from flk.kube import Object, RequestTarget, Resource
from flk.observe.client import JobClient
from flk.observe.resources import WORKLOADS, owned_resource, resource_of
from flk.spec import labels
from flk.spec.units import created_at, short_duration
from flk.targets import target_of
from flk.targets.rendezvous import needs_secret, require_secret

GARBAGE_TIMEOUT: Final = 30.0  # seconds in which the objects of a deleted job of the same name should be deleted


def create_job(client: JobClient, manifests: Sequence[Object]) -> Object:
    """Create a job (the first manifest) and the objects that it owns, release the job, and return it.

    It owns the other manifests, the shared ones together with other jobs, and its Secret. May be repeated: a job with
    the same submission in its annotations counts as created by this call. Raises ConflictError if the name is taken.
    After any other error, and after Ctrl-C, the job is deleted again, and the exception's text says whether it still
    exists.
    """
    manifest, archives = manifests[0], [other for other in manifests[1:] if _is_shared(other)]
    job: Object | None = None
    try:
        check_on_server(client, manifests)
        job = client.api.call(
            "create",
            client.target(resource_of(manifest)),
            body=_suspended(manifest),
            find_created=lambda: _find_created(client, manifest),
        )
        owner = {key: job[key] for key in ("apiVersion", "kind")}
        owner |= {key: job["metadata"][key] for key in ("name", "uid")}
        for archive in archives:
            _share(client, archive, owner)
        for other in (*manifests[1:], *objects_with_uid(job)):
            if not _is_shared(other):
                _create_owned(client, other, owner)
        for archive in archives:
            found = client.find(_resource(archive), archive["metadata"]["name"], metadata_only=True)
            if not _keeps(found, owner):
                _share(client, archive, owner)
        return _release(client, manifest, job)
    except FlkError as error:
        if job is not None:
            error.args = (f"{error}; {_undo(client, job)}",)
        raise
    except KeyboardInterrupt as interrupt:
        interrupt.args = (_outcome_of_interrupt(client, manifest, job),)
        raise


def objects_with_uid(job: Object) -> list[Object]:
    """Return the manifests of objects that need the UID of the created job: the Secret of its launchers."""
    from flk import manifest  # which `flk suspend` does not need

    return [manifest.rendezvous_secret(job, secrets.token_urlsafe(32))] if needs_secret(job) else []


def dry_run(client: JobClient, manifests: Sequence[Object]) -> list[Object]:
    """Return the manifests as the API server would store them. It checks them and creates nothing.

    Raises MissingApiError for a job in a queue where there is no Kueue.
    """
    _refuse_queue_without_kueue(client, manifests[0])
    return [_dry_run(client, manifest) for manifest in manifests]


def _dry_patch(client: JobClient, manifest: Object) -> Object:
    return client.api.call("patch", _object(client, manifest), query={"dryRun": "All"}, body={"metadata": {}})


def _dry_run(client: JobClient, manifest: Object) -> Object:
    if _is_shared(manifest) and client.find(_resource(manifest), manifest["metadata"]["name"], metadata_only=True):
        return _dry_patch(client, manifest)
    return client.api.call("create", _collection(client, manifest), query={"dryRun": "All"}, body=manifest)


def check_on_server(client: JobClient, manifests: Sequence[Object]) -> None:
    """Have the API server check one manifest of each kind, so that a refusal comes before anything is created.

    It also checks the right to patch the job, by which `create_job` releases it: with that right, the answer is that
    there is no such job. The names are not checked: `create_job` finds out whose the existing job is. Raises
    MissingApiError for a job in a queue where there is no Kueue: the API server takes such a job, and nobody starts it.
    """
    _refuse_queue_without_kueue(client, manifests[0])
    without_uid = {**manifests[0], "metadata": {**manifests[0]["metadata"], "uid": ""}}
    first_of_kind: dict[str, Object] = {}
    for manifest in (*manifests, *objects_with_uid(without_uid)):
        first_of_kind.setdefault(manifest["kind"], manifest)
    checks = [*((_dry_run, manifest) for manifest in first_of_kind.values()), (_dry_patch, manifests[0])]
    for check, manifest in checks:
        try:
            check(client, manifest)
        except (ConflictError, JobNotFoundError):
            continue
        except FlkError as error:
            if not lacks_dry_run(str(error)):
                raise


def _refuse_queue_without_kueue(client: JobClient, manifest: Object) -> None:
    queue = labels.of(manifest).get(labels.QUEUE)
    if not queue:
        return
    try:
        client.api.served(WORKLOADS)
    except ForbiddenError:
        return  # whether there is Kueue is not known
    except MissingApiError as error:
        if not error.served:
            error.args = (f"nobody would start a job in queue {queue}: {error}",)
            raise


def _suspended(manifest: Object) -> Object:
    job = copy.deepcopy(manifest)
    merge(job, target_of(job).suspension(True))
    job["metadata"].setdefault("annotations", {})[labels.INCOMPLETE] = "true"
    if needs_secret(job):
        require_secret(job)
    return job


def _release(client: JobClient, manifest: Object, job: Object) -> Object:
    """Let its controller start the job. A job that is in a queue stays suspended: Kueue starts it."""
    change: Object = {"metadata": {"annotations": {labels.INCOMPLETE: None}}}
    queued = labels.QUEUE in labels.of(job)  # a webhook may have put it into a default queue
    target = target_of(manifest)
    if not (queued or target.suspended(manifest)):
        change |= starting(client, manifest)
    return change_job(client, job, change)


def _resource(manifest: Object) -> Resource:
    return owned_resource(manifest) or resource_of(manifest)


def _create_owned(client: JobClient, manifest: Object, owner: Object) -> None:
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    body = copy.deepcopy(manifest)
    body["metadata"]["ownerReferences"] = [owner]
    began = time.monotonic()

    def find_created() -> Object | None:
        while True:
            try:
                found = client.find(_resource(manifest), name)
            except ForbiddenError:
                return None  # users may create Secrets without being able to read them
            if found is None:
                return None
            owners = [o.get("uid") for o in found["metadata"].get("ownerReferences") or []]
            if owner["uid"] in owners:
                return found
            # The garbage collector deletes the objects of a deleted job some time after the job.
            if not owners or time.monotonic() - began > GARBAGE_TIMEOUT:
                raise ConflictError(
                    f"there is a {kind} {name} in namespace {client.namespace} already, which is not this job's",
                    hint="choose another --name",
                )
            time.sleep(0.5)

    client.api.call("create", _collection(client, manifest), body=body, find_created=find_created)


def _is_shared(manifest: Object) -> bool:
    return labels.SHARED in labels.of(manifest)


def _share(client: JobClient, manifest: Object, owner: Object) -> None:
    """Make a job an owner of an archive of the namespace, which is created if it does not exist.

    Raises ConflictError if an object of this name is something else.
    """
    body = copy.deepcopy(manifest)
    body["metadata"]["ownerReferences"] = [owner]
    name = manifest["metadata"]["name"]
    began = time.monotonic()
    while True:
        found = client.find(_resource(manifest), name) or client.api.call(
            "create",
            _collection(client, manifest),
            body=body,
            find_created=lambda: client.find(_resource(manifest), name),
        )
        if found.get("binaryData") != manifest.get("binaryData"):
            raise ConflictError(
                f"there is a {manifest['kind']} {name} in namespace {client.namespace} already, which is not the "
                "archive that flk has made",
                hint=f"delete it, then submit again: {client.commands.kubectl(f'delete configmap {name}')}",
            )
        if _keeps(found, owner):
            return
        change = {"metadata": {"uid": found["metadata"]["uid"], "ownerReferences": [owner]}}
        try:
            client.api.call("patch", _object(client, manifest), body=change)
            return
        except ApiError as error:
            # The garbage collector has deleted it meanwhile, with another job.
            if error.status not in (404, 409) or time.monotonic() - began > GARBAGE_TIMEOUT:
                raise


def _keeps(archive: Object | None, owner: Object) -> bool:
    """Return whether an archive exists as long as the job does. Kubernetes deletes none that has no owners."""
    if archive is None:
        return False
    owners = [each["uid"] for each in archive["metadata"].get("ownerReferences") or []]
    return not owners or owner["uid"] in owners


def _object(client: JobClient, manifest: Object) -> RequestTarget:
    return client.target(_resource(manifest), manifest["metadata"]["name"])


def _collection(client: JobClient, manifest: Object) -> RequestTarget:
    return client.target(_resource(manifest))


def _find_created(client: JobClient, manifest: Object) -> Object | None:
    """Return the job if this submission has created it, None if there is none; else raise ConflictError."""
    name = manifest["metadata"]["name"]
    found = client.find(resource_of(manifest), name)
    if found is None:
        return None
    annotations = labels.annotations_of(found)
    owner = annotations.get(labels.OWNER)
    created = f", created {short_duration(client.now() - created_at(found))} ago" + (f" by {owner}" if owner else "")
    if found["metadata"].get("deletionTimestamp"):
        raise ConflictError(
            f"a job {name} in namespace {client.namespace}{created}, is still being deleted",
            hint=f"wait until it is gone: {client.commands.flk('delete', name)}; or choose another --name",
        )
    if _is_same_submission(manifest, found):
        return found
    if labels.INCOMPLETE in annotations:
        raise ConflictError(
            f"there is a job {name} in namespace {client.namespace} already{created}, whose submission has not ended "
            "or was interrupted: it is suspended and has no pods",
            hint=f"if nobody is submitting it now, delete it and submit again: {client.commands.flk('delete', name)}",
        )
    command = client.commands.flk
    again = "" if labels.of(found).get(labels.QUEUE) else f", {command('restart', name)} runs it again"
    raise ConflictError(
        f"there is a job {name} in namespace {client.namespace} already{created}",
        hint=f"choose another --name, or look at that one: {command('status', name)}; {command('delete', name)} frees "
        f"the name{again}",
    )


def _is_same_submission(manifest: Object, job: Object) -> bool:
    wanted, found = (labels.annotations_of(item).get(labels.SUBMISSION) for item in (manifest, job))
    return bool(wanted) and wanted == found


def _undo(client: JobClient, job: Object) -> str:
    """Delete a job whose submission has failed, and return a sentence that says whether that worked."""
    name = job["metadata"]["name"]
    try:
        client.delete_job(name, job["metadata"]["uid"])
    except FlkError as failed:
        command = client.commands.flk("delete", name)
        return f"the job {name} still exists because it could not be deleted ({failed}): {command}"
    return f"the job {name} was deleted again"


def _outcome_of_interrupt(client: JobClient, manifest: Object, job: Object | None) -> str:
    """Delete what an interrupted submission has created, and return a sentence that says what exists now."""
    name = manifest["metadata"]["name"]
    unknown = f"{client.commands.flk('status', name)} shows whether the job {name} exists"
    try:
        found = job or client.find(resource_of(manifest), name)
        if found is None or not _is_same_submission(manifest, found):
            return "nothing was created"
        return _undo(client, found)
    except FlkError as error:
        return f"{unknown} ({error})"
    except KeyboardInterrupt:
        return unknown
