"""What flk does in a cluster, call by call: jobs, their pods, logs and events, as plain dicts of the API's JSON."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final

from flk import labels
from flk.errors import ApiError, ConflictError, FlkError, ForbiddenError, JobNotFoundError
from flk.kube.client import ApiClient
from flk.kube.credentials import connect
from flk.kube.resources import Object, Resource, Target
from flk.units import short_duration, timestamp
from flk_runtime.contract import CONTAINER

JOBS: Final = Resource(labels.KUBEFLOW_GROUP, "v1", "pytorchjobs")
PODS: Final = Resource("", "v1", "pods")
LOGS: Final = Resource("", "v1", "pods", "log")
EVENTS: Final = Resource("", "v1", "events")
CONFIG_MAPS: Final = Resource("", "v1", "configmaps")
LEFTOVER: Final = 30.0  # seconds that the objects of a deleted job of the same name get to go away


class JobClient:
    """One namespace of a cluster."""

    def __init__(self, api: ApiClient, namespace: str | None = None) -> None:
        self.api = api
        self.namespace = namespace or api.access.namespace

    @classmethod
    def connect(cls, context: str | None = None, namespace: str | None = None) -> JobClient:
        """The cluster of a context (default: the current one), in its namespace if no other is named. Asks nothing."""
        return cls(ApiClient(connect(context)), namespace)

    @property
    def context(self) -> str:
        return self.api.access.context.name

    def now(self) -> float:
        """Seconds since the epoch by the API server's clock."""
        return self.api.now()

    # Reading ----------------------------------------------------------------------------------------------------

    def job(self, name: str) -> Object:
        """The PyTorchJob. JobNotFoundError if there is none."""
        return self.api.call("get", self.target(JOBS, name))

    def jobs(self, *, everywhere: bool = False) -> list[Object]:
        return self.api.list_all(Target(JOBS, None if everywhere else self.namespace))[0]

    def pods(self, job: str | None = None, *, everywhere: bool = False) -> list[Object]:
        """The pods of one job, or of all jobs."""
        selector = f"{labels.OPERATOR_JOB_NAME}={job}" if job else labels.OPERATOR_JOB_NAME
        return self.api.list_all(Target(PODS, None if everywhere else self.namespace), {"labelSelector": selector})[0]

    def pod(self, name: str) -> Object | None:
        return self._found(PODS, name)

    def events(self, kind: str, name: str) -> list[Object]:
        """The events about one object, oldest first; none where nobody may read them."""
        selector = f"involvedObject.kind={kind},involvedObject.name={name}"
        try:
            found = self.api.list_all(self.target(EVENTS), {"fieldSelector": selector})[0]
        except ForbiddenError:
            return []
        return sorted(found, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""))

    def defaults(self) -> list[tuple[str, str]]:
        """The site's defaults in this namespace: name and text of each; none where nobody may read them."""
        try:
            found = self.api.list_all(self.target(CONFIG_MAPS), {"labelSelector": f"{labels.DEFAULTS}=true"})[0]
        except ForbiddenError:
            return []
        return [
            (c["metadata"]["name"], c["data"][labels.DEFAULTS_KEY])
            for c in found
            if labels.DEFAULTS_KEY in (c.get("data") or {})
        ]

    def log(self, pod: str, idle: float, **options: Any) -> AbstractContextManager[Iterator[bytes]]:
        """Lines of the training container of a pod; ``options`` are those of the API: follow, tailLines, …"""
        query = {"container": CONTAINER, **{k: str(v).lower() if v is True else v for k, v in options.items() if v}}
        return self.api.stream("get", self.target(LOGS, pod), query=query, idle=idle)

    # Changing ---------------------------------------------------------------------------------------------------

    def create_job(self, manifests: list[Object]) -> Object:
        """Create a PyTorchJob (the first manifest) and then what belongs to it, as its own, so that nothing can leak.

        Can be repeated: a job with the same submission in its annotations is taken for the one that this call makes.
        ConflictError if the name is another's. Where a later object cannot be created, the job is deleted again.
        """
        manifest, *others = manifests
        name = manifest["metadata"]["name"]
        job = self.api.call("create", self.target(JOBS), body=manifest, find_created=lambda: self._own_job(manifest))
        owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": name, "uid": job["metadata"]["uid"]}
        try:
            for other in others:
                owned = copy.deepcopy(other)
                owned["metadata"]["ownerReferences"] = [owner]
                self._create_owned(owned)
        except BaseException as error:
            self._undo(name, owner["uid"], error)
            raise
        return job

    def try_job(self, manifests: list[Object]) -> list[Object]:
        """What the API server would make of the manifests (a dry run)."""
        kinds = {"PyTorchJob": JOBS, "ConfigMap": CONFIG_MAPS}
        dry = {"dryRun": "All"}
        return [self.api.call("create", self.target(kinds[m["kind"]]), query=dry, body=m) for m in manifests]

    def delete_job(self, name: str, uid: str | None = None) -> Object:
        """Have a job deleted with everything that belongs to it; it is there until its pods are gone."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        return self.api.call("delete", self.target(JOBS, name), body=body)

    def target(self, resource: Resource, name: str | None = None) -> Target:
        return Target(resource, self.namespace, name)

    def _found(self, resource: Resource, name: str) -> Object | None:
        try:
            return self.api.call("get", self.target(resource, name))
        except JobNotFoundError:
            return None
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _own_job(self, manifest: Object) -> Object | None:
        """The job if this submission has made it already, None if nobody has."""
        name = manifest["metadata"]["name"]
        found = self._found(JOBS, name)
        if found is None:
            return None
        notes = found["metadata"].get("annotations") or {}
        submission = (manifest["metadata"].get("annotations") or {}).get(labels.SUBMISSION)
        if submission and notes.get(labels.SUBMISSION) == submission:
            return found
        owner = notes.get(labels.OWNER)
        made = f", made {age(found, self.now())} ago" + (f" by {owner}" if owner else "")
        if found["metadata"].get("deletionTimestamp"):
            raise ConflictError(
                f"a job {name} in namespace {self.namespace}{made}, is still being deleted",
                hint=f"wait until it is gone: flk delete {name} -n {self.namespace}; or choose another --name",
                status=409,
            )
        raise ConflictError(
            f"there is a job {name} in namespace {self.namespace} already{made}",
            hint=f"choose another --name, or look at that one: flk status {name} -n {self.namespace}",
            status=409,
        )

    def _create_owned(self, manifest: Object) -> None:
        name, owner = manifest["metadata"]["name"], manifest["metadata"]["ownerReferences"][0]["uid"]
        began = time.monotonic()

        def find_created() -> Object | None:
            while True:
                found = self._found(CONFIG_MAPS, name)
                if found is None:
                    return None
                owners = [o.get("uid") for o in found["metadata"].get("ownerReferences") or []]
                if owner in owners:
                    return found
                # A job of this name that was deleted a moment ago leaves its own behind for a moment.
                if not owners or time.monotonic() - began > LEFTOVER:
                    raise ConflictError(
                        f"there is a ConfigMap {name} in namespace {self.namespace} already, of something else",
                        hint="choose another --name",
                        status=409,
                    )
                time.sleep(0.5)

        self.api.call("create", self.target(CONFIG_MAPS), body=manifest, find_created=find_created)

    def _undo(self, name: str, uid: str, error: BaseException) -> None:
        try:
            self.delete_job(name, uid)
            undone = f"the job {name} was deleted again"
        except FlkError as failed:
            undone = f"the job {name} is still there and could not be deleted ({failed}): flk delete {name}"
        if isinstance(error, FlkError):
            error.args = (f"{error}; {undone}",)


def age(thing: Object, now: float) -> str:
    """How long ago an object was made, in the two largest units, as kubectl writes it."""
    return short_duration(now - timestamp(thing["metadata"].get("creationTimestamp")))
