"""JobClient: the requests that flk sends about jobs, their pods, logs and events, in one namespace of a cluster."""

from __future__ import annotations

import contextlib
import copy
import difflib
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from flk import targets
from flk.errors import ApiError, FlkError, ForbiddenError, JobNotFoundError, MissingApiError, UsageError
from flk.kube import ApiClient, Object, RequestTarget, Resource, check_selector, connect
from flk.observe.pods import training_container
from flk.observe.pool import ReadPool
from flk.observe.resources import CONFIG_MAPS, DEPLOYMENTS, EVENTS, EXEC, LOGS, NAMESPACES, PODS, RESOURCES
from flk.spec import labels
from flk.spec.names import object_name
from flk.targets import TARGETS
from flk.targets.model import Controller
from flk.user.commands import Commands
from flk_runtime.contract.values import dataclass, field, replace

if TYPE_CHECKING:
    from flk.kube.sockets import Executed

_LOG_IDLE: Final = 5.0  # seconds without a byte of the log after which it is given up


@dataclass(frozen=True)
class JobRef:
    """The name of a job, and its kind or UID where these are known: jobs of several kinds may have one name."""

    name: str
    target: targets.Target | None = None  # of its kind
    uid: str = ""
    named: bool = field(default=True, compare=False)  # the user has named it; labels choose the others

    @classmethod
    def parse(cls, text: str) -> JobRef:
        """Return the job that ``NAME`` or ``KIND/NAME`` means: ``gpt``, ``job.batch/gpt``. Raises UsageError else."""
        kind, slash, name = text.rpartition("/")
        known = {
            f"{s}{g}": t for t in TARGETS.values() for s in (t.kind.lower(), t.plural) for g in ("", f".{t.group}")
        }
        if slash and kind not in known:
            raise UsageError(f"JOB: must be a name or pytorchjob.kubeflow.org/NAME (is {text!r})")
        try:
            return cls(object_name(name), known.get(kind))
        except ValueError as error:
            raise UsageError(f"JOB: {error}") from None

    def means(self, job: Object) -> bool:
        """Return whether a job with this name is the one that is meant."""
        of_kind = self.target is None or job.get("kind") in (None, self.target.kind)
        return of_kind and self.uid in ("", job["metadata"].get("uid"))

    def __str__(self) -> str:
        return f"{RESOURCES[self.target.name].singular}/{self.name}" if self.target else self.name


class JobClient:
    """One namespace of a cluster. Objects are plain dicts of the API's JSON."""

    def __init__(self, api: ApiClient, namespace: str | None = None) -> None:
        self.api = api
        self.namespace = namespace or api.access.namespace
        self.commands = Commands(self.namespace, api.access.context.connection)
        self._targets: dict[str, targets.Target] = {}  # by the names of jobs that were read
        self._refs: dict[str, JobRef] = {}  # by name: the jobs that are meant where others have the name, too

    @classmethod
    def connect(cls, context: str | None = None, namespace: str | None = None) -> JobClient:
        """Return a client for a context of the kubeconfig (default: the current one) and a namespace (default: its).

        Sends no request.
        """
        return cls(ApiClient(connect(context)), namespace)

    def for_job(self, job: JobRef) -> JobClient:
        """Return a client of the same namespace for which the job's name means this job, and no other one."""
        if self._refs.get(job.name) == job:
            return self
        client = JobClient(self.api, self.namespace)
        client._refs[job.name] = job
        if job.target is None and (known := self._targets.get(job.name)):
            client._targets[job.name] = known
        client.commands = replace(client.commands, job=(job.name, self.word(job)))
        return client

    def word(self, job: JobRef) -> str:
        """Return what a command takes: the name, with the kind if the name could mean a job of another kind first."""
        alone = job.target in (None, targets.DEFAULT) or job.target is self._served()[0]
        return job.name if alone else str(job)

    def with_deadline(self, timeout: float | None) -> JobClient:
        """Return a client whose requests end soon after so many seconds from now (see ApiClient.with_deadline)."""
        client = copy.copy(self)
        client.api = self.api.with_deadline(timeout)
        return client

    def ref(self, name: str) -> JobRef:
        """Return which job of a name is meant."""
        return self._refs.get(name) or JobRef(name)

    @property
    def context(self) -> str:
        """Name of the context."""
        return self.api.access.context.name

    def now(self) -> float:
        """Return the time by the API server's clock, in seconds since the epoch."""
        return self.api.now()

    # Reading

    def get_job(self, name: str, *, again: bool = False) -> Object:
        """Return the job of that name, of whichever kind it is.

        A kind that was installed since the cluster told its kinds is found after a minute at the latest. Raises
        JobNotFoundError if there is none; its text says if the user may not read PyTorchJobs. ``again``: a kind was
        refused a moment ago.
        """
        ref = self.ref(name)
        known = ref.target or self._targets.get(name)
        asked = [known] if known else self._served()
        unknown: dict[targets.Target, FlkError] = {}  # kinds that the API server does not serve, or does not let read
        for target in asked:
            try:
                job = self.api.call("get", self.target(RESOURCES[target.name], name))
            except JobNotFoundError:
                continue
            except (ForbiddenError, MissingApiError) as error:
                unknown[target] = error
            except ApiError as error:
                if error.status != 404 or "there is no namespace" in str(error):
                    raise
            else:
                if _is_training_job(target, job) and ref.means(_with_kind(job, target)):
                    self._targets[name] = target
                    return _with_kind(job, target)
        self._targets.pop(name, None)
        if len(unknown) == len(asked):
            raise _most_telling(unknown.values())
        # A server that has just started refuses everything until it has read the roles. It answers about others now.
        if not again and any(isinstance(error, ForbiddenError) for error in unknown.values()):
            return self.get_job(name, again=True)
        absent = self.no_job(ref, explained=True)
        if isinstance(refused := unknown.get(targets.DEFAULT), ForbiddenError):
            absent.args = (f"{absent} that you may read: {refused}",)
        raise absent

    def no_job(self, ref: JobRef, *, explained: bool = False) -> JobNotFoundError:
        """Return the error that says that a job does not exist.

        ``explained``: requests find out whether its namespace does, and which job may have been meant.
        """
        hint = f"{self.commands.flk('list')} lists those that exist"
        where = f"in namespace {self.namespace}"
        names: list[str] = []
        if explained:
            with contextlib.suppress(FlkError):
                # Of the first kind only: who has mistyped a name waits for the answer.
                listed = self._list_of(self._served()[0], self.namespace, None, metadata_only=True)
                names = [str(job["metadata"]["name"]) for job in listed]
        near = difflib.get_close_matches(ref.name, names, n=1)
        if ref.name in ("job", "jobs", "pod", "pods"):  # which kubectl takes before a name
            hint = f"flk's commands take the names of jobs alone, and kubectl is for pods; {hint}"
        elif near and near[0] != ref.name:
            hint = f"did you mean {near[0]}? {hint}"
        elif explained and not names and self.lacks_namespace():
            where += ", which this cluster does not have"
            hint = f"{self.commands.kubectl('get namespaces', namespaced=False)} lists those that it has"
        return JobNotFoundError(f"there is no job {ref} {where}", hint=hint)

    def _served(self) -> list[targets.Target]:
        """Return the kinds of jobs that the cluster serves; all of them if it serves none, for the error."""
        every = list(TARGETS.values())
        return [target for target in every if self.api.serves(RESOURCES[target.name])] or every

    def _installed_since(self, served: list[targets.Target]) -> list[targets.Target]:
        """Return the kinds of jobs besides these that the cluster serves now."""
        self.api.ask_what_is_served()
        return [target for target in self._served() if target not in served]

    def target_of(self, name: str) -> targets.Target:
        """Return the target of a job, by the kind of its object. Raises JobNotFoundError if there is no such job."""
        return self._targets.get(name) or targets.target_of(self.get_job(name))

    def list_jobs(
        self, *, all_namespaces: bool = False, selector: str | None = None, metadata_only: bool = False
    ) -> list[Object]:
        """Return the jobs of the namespace, or of all namespaces, whose labels match the selector.

        With ``metadata_only`` they have neither spec nor status. Kinds that the cluster does not serve, and those that
        the user may not list, are left out. Raises UsageError for a selector that is none, MissingApiError if no kind
        is served, and ForbiddenError if there are no others and the user may not list PyTorchJobs.
        """
        if selector:
            check_selector(selector.removeprefix(f"{labels.JOB},"))
        where = None if all_namespaces else self.namespace
        served = self._served()
        replies = self._lists_of(served, where, selector, metadata_only)
        if not any(isinstance(reply, list) and reply for reply in replies):
            replies += self._lists_of(self._installed_since(served), where, selector, metadata_only)
        found = [job for reply in replies if isinstance(reply, list) for job in reply]
        unknown = [reply for reply in replies if isinstance(reply, FlkError)]
        if len(unknown) == len(replies):
            raise _most_telling(unknown)
        if not found and isinstance(replies[0], ForbiddenError):
            raise replies[0]  # "there are no jobs" would be a guess
        return found

    def _lists_of(
        self, kinds: list[targets.Target], namespace: str | None, selector: str | None, metadata_only: bool
    ) -> list[list[Object] | FlkError]:
        """Return the jobs of each kind, or the error that says that there are none, or that the user may not list."""
        replies: list[list[Object] | FlkError] = []
        with ReadPool() as pool:
            futures = [pool.submit(self._list_of, kind, namespace, selector, metadata_only) for kind in kinds]
            wait(futures)
        for future in futures:
            try:
                replies.append(future.result())
            except (ForbiddenError, MissingApiError) as error:
                replies.append(error)
        return replies

    def _list_of(
        self, target: targets.Target, namespace: str | None, selector: str | None, metadata_only: bool
    ) -> list[Object]:
        """Return the jobs of one kind."""
        where = RequestTarget(RESOURCES[target.name], namespace, metadata_only=metadata_only)
        chosen = ",".join(filter(None, (target.selector, selector))) or None
        found = self.api.list_all(where, {"labelSelector": chosen})[0]
        return [_with_kind(job, target) for job in found if _is_training_job(target, job)]

    def list_pods(self, job: str) -> list[Object]:
        """Return the pods with the name of a job. Pods of an earlier job of that name may be among them."""
        selector = self.target_of(job).pod_selector(job)
        return self.api.list_all(self.target(PODS), {"labelSelector": selector})[0]

    def pods_of(self, job: Object) -> list[Object]:
        """Return the pods of exactly this job."""
        return targets.target_of(job).own(self.list_pods(job["metadata"]["name"]), job)

    def list_all_pods(self, target: targets.Target, *, all_namespaces: bool = False) -> list[Object]:
        """Return the pods of all jobs of one kind."""
        where = RequestTarget(PODS, None if all_namespaces else self.namespace)
        return self.api.list_all(where, {"labelSelector": target.pod_selector("")})[0]

    def get_pod(self, name: str, job: str) -> Object:
        """Return the pod of that name. Raises ApiError if there is none: it may have gone since its job was read."""
        pod = self.find(PODS, name)
        if pod is None:
            raise ApiError(f"pod {name} does not exist", hint=f"{self.commands.flk('why', job)} says why", status=404)
        return pod

    def list_events(self, kind: str, name: str) -> list[Object]:
        """Return the events about one object. Raises ForbiddenError where the user may not read them."""
        return self._events(self.namespace, f"involvedObject.kind={kind},involvedObject.name={name}")

    def list_events_about(self, kind: str, *, without: Iterable[str], all_namespaces: bool = False) -> list[Object]:
        """Return the events about objects of a kind, ``without`` events of some reasons.

        Raises ForbiddenError where the user may not read them.
        """
        selector = ",".join((f"involvedObject.kind={kind}", *(f"reason!={reason}" for reason in without)))
        return self._events(None if all_namespaces else self.namespace, selector)

    def _events(self, namespace: str | None, fields: str) -> list[Object]:
        return self.api.list_all(RequestTarget(EVENTS, namespace), {"fieldSelector": fields})[0]

    def list_defaults(self) -> list[tuple[str, str]]:
        """Return name and text of each ConfigMap with defaults of the namespace; none where they may not be read."""
        try:
            found = self.api.list_all(self.target(CONFIG_MAPS), {"labelSelector": f"{labels.DEFAULTS}=true"})[0]
        except ForbiddenError:
            return []
        return [
            (c["metadata"]["name"], c["data"][labels.DEFAULTS_KEY])
            for c in found
            if labels.DEFAULTS_KEY in (c.get("data") or {})
        ]

    def list_deployments(self, controller: Controller) -> list[Object]:
        """Return a controller's Deployments in all namespaces. Raises ForbiddenError for users who may not list."""
        return self.api.list_all(RequestTarget(DEPLOYMENTS), {"labelSelector": controller.selector})[0]

    def stream_log(
        self, pod: Object, idle: float, *, container: str = "", **options: Any
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Stream the lines of a pod's training container, or of another ``container``.

        ``options`` are the API's options for logs (follow, tailLines, …); a value of None leaves one out. Raises
        UnreachableError when nothing comes for ``idle`` seconds, UsageError if the pod has no such container.
        """
        given = {key: value for key, value in options.items() if value is not None and value is not False}
        query = {key: "true" if value is True else str(value) for key, value in given.items()}
        query["container"] = container_of(pod, container)
        return self.api.stream("get", self.target(LOGS, pod["metadata"]["name"]), query=query, idle=idle)

    def last_lines(self, pod: Object, count: int, **options: Any) -> list[str]:
        """Return the last lines of a pod's training container; not all, if the log breaks off.

        Raises ApiError if none can be read.
        """
        found: list[str] = []
        try:
            with self.stream_log(pod, _LOG_IDLE, tailLines=count, **options) as lines:
                found.extend(line.decode(errors="replace") for line in lines)
        except ApiError:
            if not found:
                raise
        return found

    def execute(self, pod: Object, command: list[str], timeout: float) -> Executed:
        """Run a command in a pod's training container (see flk.kube.sockets.execute)."""
        from flk.kube.sockets import execute

        target, container = self.target(EXEC, pod["metadata"]["name"]), container_of(pod)
        return execute(self.api.access, target, command, container=container, timeout=timeout)

    def lacks_namespace(self) -> bool:
        """Return whether the API server says that the namespace does not exist; not every user may ask."""
        try:
            self.api.call("get", RequestTarget(NAMESPACES, name=self.namespace))
        except ApiError as error:
            return error.status == 404
        return False

    # Changing

    def delete_job(self, name: str, uid: str | None = None) -> Object:
        """Delete a job and everything that it owns. It exists until its pods are gone, except for a TrainJob."""
        target = self.target_of(name)
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": target.deletion}
        if uid:
            body["preconditions"] = {"uid": uid}
        return self.api.call("delete", self.target(RESOURCES[target.name], name), body=body)

    def target(self, resource: Resource, name: str | None = None) -> RequestTarget:
        """Return an object (or the collection) of a kind in this namespace."""
        return RequestTarget(resource, self.namespace, name)

    def find(self, resource: Resource, name: str, *, metadata_only: bool = False) -> Object | None:
        """Return the object of a kind and name in this namespace, None if there is none."""
        return self.find_at(RequestTarget(resource, self.namespace, name, metadata_only=metadata_only))

    def find_at(self, target: RequestTarget) -> Object | None:
        """Return the object at a path of the API, None if there is none."""
        try:
            return self.api.call("get", target)
        except JobNotFoundError:
            return None
        except ApiError as error:
            if error.status == 404:
                return None
            raise


def container_of(pod: Object, chosen: str = "") -> str:
    """Return the name of the container of a pod that ``--container`` chooses; the training container for an empty one.

    Raises UsageError if the pod has no such container.
    """
    if not chosen:
        return str(training_container(pod).get("name") or targets.DEFAULT.container)
    spec = pod.get("spec") or {}
    names = [c["name"] for kind in ("containers", "initContainers") for c in spec.get(kind) or []]
    if chosen not in names:
        found = f"containers {', '.join(names)}" if len(names) > 1 else f"the container {names[0]}"
        raise UsageError(f"--container: pod {pod['metadata']['name']} has {found}, no {chosen}")
    return chosen


def _most_telling(errors: Iterable[FlkError]) -> FlkError:
    """Return the first error that says that the user may not read a kind, else the first one."""
    return min(errors, key=lambda error: not isinstance(error, ForbiddenError))


def _is_training_job(target: targets.Target, job: Object) -> bool:
    """Return whether an object is a job of its own: neither foreign, nor a part of another job."""
    meta = job["metadata"]
    if target.selector and target.selector not in (meta.get("labels") or {}):
        return False
    return not any(owner.get("kind") in ("TrainJob", "JobSet") for owner in meta.get("ownerReferences") or [])


def _with_kind(job: Object, target: targets.Target) -> Object:
    """Return an object with its kind, which lists leave out, or give as PartialObjectMetadata."""
    return {**job, "apiVersion": target.api_version, "kind": target.kind}
